"""Joins OneFlow's cluster, then imports what needs oneflow, which fixes its cluster while it is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.plugin import World
from unidist_oneflow import OneFlowOptions
from unidist_oneflow.cluster import Cluster
from unidist_oneflow.devices import pick_device, visible_gpus

if TYPE_CHECKING:
    from unidist_oneflow.models import OneFlowBackend


def connect(world: World, options: OneFlowOptions, device: str | None, timeout: float) -> OneFlowBackend:
    chosen = pick_device(device, visible_gpus(), world)
    cluster = Cluster(world, options, on_gpu=chosen != "cpu", timeout=timeout)
    from unidist_oneflow.models import OneFlowBackend

    return OneFlowBackend(cluster, options, chosen)

"""Which contexts a worker computes on: a plain function of what is there, so that a CPU can test it."""

from __future__ import annotations

import re

from unidist.plugin import UsageError, World


def pick_contexts(asked: str | None, devices: int | list[str], gpus: int, world: World) -> list[tuple[str, int]]:
    """("cpu", 0), … or ("gpu", 1), …. `asked` is Strategy's device=, `devices` the option, `gpus` what MXNet sees."""
    if isinstance(devices, (list, tuple)):
        if asked is not None:
            raise UsageError(f"device={asked!r} and devices={devices!r} both name devices: keep one")
        chosen = [_parse(device) for device in devices]
        if len(set(chosen)) < len(chosen):
            raise UsageError(f"devices={devices!r} names one twice")
        return [_existing(kind, index or 0, gpus) for kind, index in chosen]
    kind, index = _parse(asked or ("gpu" if gpus else "cpu"))
    if index is None:
        # Each process of a node takes its own GPUs; CPU contexts are only names for the same cores.
        index = max(world.local_rank, 0) * devices if kind == "gpu" else 0
    elif devices > 1:
        _existing(kind, index, gpus)
        raise UsageError(f"device={asked!r} is one device, and devices={devices}: name them all in devices=[…]")
    return [_existing(kind, index + n, gpus) for n in range(devices)]


def _parse(name: str) -> tuple[str, int | None]:
    """cpu, cpu(1), gpu, gpu(0), cuda:0."""
    match = re.fullmatch(r"(cpu|gpu|cuda)(?:[(:](\d+)\)?)?", name.strip())
    if match is None:
        raise UsageError(f"device {name!r} is not one of cpu, cpu(N), gpu, gpu(N)")
    return {"cuda": "gpu"}.get(match[1], match[1]), None if match[2] is None else int(match[2])


def _existing(kind: str, index: int, gpus: int) -> tuple[str, int]:
    if kind == "gpu" and index >= gpus:
        raise UsageError(
            f"GPU {index} was asked for, but MXNet sees {gpus or 'no'} GPU{'s' * (gpus != 1)} (a build for CUDA is "
            "called mxnet-cuXXX). Say device='cpu' to do without."
        )
    return kind, index

"""Which device a process takes, decided before oneflow is imported."""

from __future__ import annotations

import os

from unidist.plugin import UsageError, World, device_kind


def pick_device(asked: str | None, gpus: int, world: World) -> str:
    """A GPU asked for and not there is an error."""
    kind, index = device_kind(asked, gpus)
    if kind == "cpu":
        return "cpu"
    wanted = max(0, world.local_rank) if index is None else index
    if wanted >= gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        limited = f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else ""
        raise UsageError(
            f"device {asked or 'cuda'!r} was asked for on local rank {world.local_rank}, but this host shows {gpus} "
            f"GPU(s){limited}: start at most one process for each, or say device='cpu'"
        )
    if index is not None and wanted != world.local_rank:
        raise UsageError(
            f"device {asked!r} was asked for on local rank {world.local_rank}: OneFlow gives each process the GPU of "
            "its local rank; say device='cuda', and choose with CUDA_VISIBLE_DEVICES"
        )
    return f"cuda:{wanted}"


def visible_gpus() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        present = len(os.listdir("/proc/driver/nvidia/gpus"))
    except OSError:
        return 0
    if visible is None:
        return present
    return min(present, len([device for device in visible.split(",") if device.strip() not in ("", "-1")]))

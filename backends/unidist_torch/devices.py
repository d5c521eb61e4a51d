"""Which device and which transport a process takes: plain functions of what is there, so that a CPU can test them."""

from __future__ import annotations

from unidist.plugin import UsageError, World, device_kind


def pick_device(asked: str | None, gpus: int, world: World, visible: str | None) -> str:
    """`gpus` is what torch can see, `visible` is CUDA_VISIBLE_DEVICES. A GPU asked for and not there is an error."""
    kind, index = device_kind(asked, gpus)
    if kind == "cpu":
        return "cpu"
    limited = f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else ""
    if gpus == 0:
        raise UsageError(
            f"device {asked!r} was asked for, but torch sees no GPU{limited}. Say device='cpu' to do without."
        )
    if index is not None:
        if index >= gpus:
            raise UsageError(f"device {asked!r} was asked for, but torch sees {gpus} GPU(s){limited}")
        return f"cuda:{index}"
    if world.local_rank < gpus:
        return f"cuda:{world.local_rank}"
    if gpus == 1 and visible is not None and len(visible.split(",")) == 1:
        return "cuda:0"  # the launcher gave every process its own GPU and hid the others
    raise UsageError(
        f"{world.local_world_size} processes run on this node, but torch sees {gpus} GPU(s){limited}: start at most "
        "one process for each, or say device='cpu'"
    )


def pick_transport(asked: str, device: str, available: set[str]) -> tuple[str, str]:
    """The transport and why. `available` is what this build of torch holds."""
    on_gpu = device.startswith("cuda")
    if asked == "auto":
        chosen = "nccl" if on_gpu and "nccl" in available else "gloo"
        return chosen, f"chosen for {device.partition(':')[0]}"
    if asked not in available:
        advice = "; mpi needs torch built from source with an MPI library" if asked == "mpi" else ""
        raise UsageError(
            f"transport {asked!r} was asked for, but this build of torch has only {', '.join(sorted(available))}"
            f"{advice}. transport='auto' takes the right one."
        )
    if asked == "nccl" and not on_gpu:
        raise UsageError("transport 'nccl' moves GPU memory only, and the device is cpu: use 'gloo', or device='cuda'")
    return asked, "asked for"

"""The torch backend's declaration. Nothing here imports torch: the launcher reads this file."""

from __future__ import annotations

from dataclasses import dataclass

from unidist import Capabilities, Plugin
from unidist.errors import UsageError

TRANSPORTS = ("auto", "gloo", "nccl", "mpi")


@dataclass(frozen=True)
class TorchOptions:
    """`transport` carries the gradients: "auto" takes nccl on GPUs and gloo on CPUs. The rest are DDP's own knobs."""

    transport: str = "auto"
    collective_timeout: float = 1800.0  # seconds that a rank waits inside a collective for the others
    bucket_cap_mb: float = 25.0
    find_unused_parameters: bool = False
    static_graph: bool = False
    broadcast_buffers: bool = True

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise UsageError(f"transport is {self.transport!r}, it must be one of {', '.join(TRANSPORTS)}")
        for name in ("collective_timeout", "bucket_cap_mb"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
                raise UsageError(f"{name} is {value!r}, it must be a number above 0")
        for name in ("find_unused_parameters", "static_graph", "broadcast_buffers"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} is {getattr(self, name)!r}, it must be true or false")


plugin = Plugin(
    name="torch",
    backend="unidist_torch.backend:TorchBackend",
    options=TorchOptions,
    requires=("torch",),
    bench="unidist_torch.bench",
    capabilities=Capabilities(gpu="written for CUDA with NCCL, not run by the tests: they have no GPU"),
)

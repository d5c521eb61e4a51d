"""The torch backend's declaration. Nothing here imports torch: the launcher reads this file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from unidist.plugin import ArrayNames, Capabilities, Plugin, check_choice, check_flag, check_positive, check_seconds
from unidist_torch.recipe import RECIPE

Transport = Literal["auto", "gloo", "nccl", "mpi"]


@dataclass(frozen=True)
class TorchOptions:
    """`transport` carries the gradients: "auto" takes nccl on GPUs and gloo on CPUs. The rest are DDP's own knobs."""

    transport: Transport = "auto"
    collective_timeout: float = 1800.0  # seconds that a rank waits inside a collective for the others
    bucket_cap_mb: float = 25.0
    find_unused_parameters: bool = False
    static_graph: bool = False
    broadcast_buffers: bool = True

    def __post_init__(self) -> None:
        check_choice("transport", self.transport, get_args(Transport))
        object.__setattr__(self, "collective_timeout", check_seconds("collective_timeout", self.collective_timeout))
        check_positive("bucket_cap_mb", self.bucket_cap_mb)
        for name in ("find_unused_parameters", "static_graph", "broadcast_buffers"):
            check_flag(name, getattr(self, name))


plugin = Plugin(
    name="torch",
    backend="unidist_torch.backend:TorchBackend",
    options=TorchOptions,
    requires=("torch",),
    bench="unidist_torch.bench",
    bench_launch="unidist_torch.bench_launch",
    recipe=RECIPE,
    interface_variables=("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"),
    echoes=("recvValue failed", "Socket closed"),
    # DataParallel, DDP and torch.compile. A BatchNorm uses its count of batches only where its momentum is None.
    names=ArrayNames(wrappers=("module.", "_orig_mod."), extra={"num_batches_tracked": "int64"}),
    capabilities=Capabilities(gpu="written for CUDA with NCCL, not run by the tests: they have no GPU"),
)

"""The declaration: what unidist knows of this backend before it starts. Nothing here may import numpy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from unidist.plugin import NEEDED, Capabilities, Plugin, Recipe, Stage, check_flag


@dataclass(frozen=True)
class SocketsOptions:
    nodelay: bool = True  # False lets TCP hold small messages back, to join them

    def __post_init__(self) -> None:
        check_flag("nodelay", self.nodelay)


plugin = Plugin(
    name="sockets",
    backend="unidist_sockets.backend:SocketsBackend",
    options=SocketsOptions,
    requires=("numpy",),
    capabilities=Capabilities(
        native_loader="tiny has no data loader: give the loader arrays, or the names of .npy files",
        sync_batchnorm="tiny's BatchNorm knows the rows of its own rank only: make the local batch larger",
        mixed_precision="NumPy computes float16 slower than float32: leave precision= out",
        compression="gradients travel as they are: leave compression= out, or exchange less with sync_every=",
        compile="NumPy has no compiler: leave compile= out",
        gpu="NumPy computes on the CPU: use another backend",
    ),
    bench="unidist_sockets.bench",
    recipe=Recipe(
        "sockets",
        python=("3.11", "3.12", "3.10", "3.13"),
        every=NEEDED,
        stages=(Stage("sockets", ("numpy==2.2.6",), probe=str(Path(__file__).with_name("probe.py"))),),
    ),
)

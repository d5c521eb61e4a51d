"""What `prepare` is asked for, beside the model and its optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from unidist import compression as compressions
from unidist.backend import Features
from unidist.checks import check_whole
from unidist.errors import UsageError
from unidist.optim import OptimizerSpec


@dataclass(frozen=True)
class Settings:
    """As `Strategy.prepare` explains them. They must be the same on all ranks."""

    accumulate: int
    sync_every: int
    sync_batchnorm: bool
    precision: Any
    compression: Any
    check_every: int

    @property
    def local(self) -> bool:
        """Local SGD."""
        return self.sync_every != 1

    @property
    def features(self) -> Features:
        return Features(self.sync_batchnorm, self.precision, self.compression, self.accumulate > 1, self.local)

    def check(self, optimizer: Any, require: Callable[[str], None]) -> None:
        """Everything that can be refused without the other ranks, before anything is communicated."""
        check_whole("accumulate", self.accumulate, 1)
        check_whole("sync_every", self.sync_every, 0)
        check_whole("check_every", self.check_every, 0)
        if self.precision not in (None, "bf16", "fp16"):
            raise UsageError(f"precision is {self.precision!r}, it must be 'bf16', 'fp16' or None")
        compressions.check(self.compression, self.precision)
        if self.local and self.compression is not None:
            raise UsageError(
                "compression= makes gradients travel lighter, with sync_every= they do not travel: choose one"
            )
        for asked, capability in (
            (self.accumulate > 1, "accumulate"),
            (self.local, "local_sgd"),
            (self.sync_batchnorm, "sync_batchnorm"),
            (self.precision is not None, "mixed_precision"),
            (self.compression is not None, "compression"),
            (optimizer is not None and not isinstance(optimizer, OptimizerSpec), "native_optimizer"),
        ):
            if asked:
                require(capability)

"""How large a batch is, on a device, in a worker and over the whole job: stated once, derived everywhere."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from unidist.checks import is_whole
from unidist.errors import UsageError

Scale = Literal["linear", "sqrt"]


@dataclass(frozen=True)
class Batch:
    """`str()` of it: "64 per device x 4 devices = 256 per worker, x 2 workers = 512 global"."""

    per_device: int
    devices: int = 1
    workers: int = 1
    scale: Scale | None = None
    lockstep: bool = True  # an update is made of all workers' samples; where not, of those of one worker

    @classmethod
    def of(
        cls,
        per_device_batch: int | None,
        global_batch: int | None,
        *,
        devices: int,
        workers: int,
        scale: Scale | None = None,
        lockstep: bool = True,
    ) -> Batch:
        """Take exactly one of the two sizes; a global batch that does not divide is refused."""
        if (per_device_batch is None) == (global_batch is None):
            raise UsageError("give exactly one of per_device_batch= and global_batch=")
        size = per_device_batch if global_batch is None else global_batch
        name = "per_device_batch" if global_batch is None else "global_batch"
        if not is_whole(size, 1):
            raise UsageError(f"{name} is {size!r}, it must be a whole number above 0")
        if scale not in (None, "linear", "sqrt"):
            raise UsageError(f"scale is {scale!r}, it must be 'linear', 'sqrt' or None")
        if global_batch is None:
            return cls(size, devices, workers, scale, lockstep)
        if scale is not None:
            raise UsageError(
                "scale= corrects the learning rate for a batch that grows with the job; global_batch= does not grow. "
                "Use per_device_batch= with scale=, or leave scale= out."
            )
        parts = devices * workers
        if size % parts:
            below = size // parts * parts
            nearest = " or ".join(str(multiple) for multiple in (below, below + parts) if multiple)
            raise UsageError(
                f"global_batch {size} does not divide over {workers} workers x {devices} devices; try {nearest}"
            )
        return cls(size // parts, devices, workers, lockstep=lockstep)

    @property
    def per_worker(self) -> int:
        return self.per_device * self.devices

    @property
    def global_batch(self) -> int:
        return self.per_worker * self.workers

    @property
    def lr_scale(self) -> float:
        """Factor for a learning rate that was tuned on one device; 1.0 unless scale= asked for it.

        It goes by the samples of one update: without lockstep the number of workers does not make them more.
        """
        growth = self.devices * (self.workers if self.lockstep else 1)
        return {None: 1.0, "linear": float(growth), "sqrt": math.sqrt(growth)}[self.scale]

    def __str__(self) -> str:
        scaled = f", learning rate x {self.lr_scale:g} ({self.scale})" if self.scale else ""
        return (
            f"{self.per_device} per device x {self.devices} device{'s' * (self.devices > 1)} = {self.per_worker} "
            f"per worker, x {self.workers} worker{'s' * (self.workers > 1)} = {self.global_batch} global{scaled}"
        )

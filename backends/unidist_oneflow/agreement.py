"""Consistent view: do the ranks' batches have one shape and one weight, so that they are parts of a global one?"""

from __future__ import annotations

import itertools
import zlib
from typing import TYPE_CHECKING

import numpy as np

from unidist.plugin import RanksMissing, StateError

if TYPE_CHECKING:
    from unidist_oneflow.models import OneFlowBackend

# Seconds that a rank may come later than the others to the first step, and to one with another shape of batches.
LONG_PATIENCE, PATIENCE = 3600.0, 60.0

_steps = itertools.count()


class Agreement:
    """To compare at every step took half as long as a small step, on a busy machine. So the ranks compare the first
    shape, and after that only when they see another one. Who sees none would not come to a comparison, but wait inside
    the engine: the others refuse to go on. Once shapes have changed, and all have seen it, they compare at every step.

    Once they differed, each rank computes by itself: which of them has something new next time, the others could not
    know.
    """

    def __init__(self, backend: OneFlowBackend) -> None:
        self._backend, self._number = backend, next(_steps)
        self._calls = 0
        self._usual: str | None = None
        self._even: set[str] = set()  # shapes of batches that a loader knows to be alike: all ranks see these together
        self._changing = False
        self.differ = False

    def reached(self, shape: str, even: bool | None) -> bool:
        self._calls += 1
        if self.differ or self._backend.world.world_size == 1:
            return not self.differ
        if even:
            if shape not in self._even:
                self._even.add(shape)
                self._compare(shape)
        elif self._changing:
            self._compare_in_engine(shape)
        elif shape != self._usual:
            self._compare(shape)
            self._changing, self._usual = self._usual is not None, shape
        return not self.differ

    def _compare(self, shape: str) -> None:
        peers = self._backend.world.peers
        if peers is None:
            self._compare_in_engine(shape)
            return
        patience = LONG_PATIENCE if self._calls == 1 else PATIENCE
        try:
            everyone = peers.gather(f"batch {self._number}/{self._calls}", shape, patience)
        except RanksMissing as error:
            raise StateError(
                f"rank {self._backend.world.rank} comes to step {self._calls} with a batch of another shape, {shape} "
                f"after {self._usual}, and not all ranks do: their parts make no global batch. Take batches from "
                "strategy.loader, say step(…, weight=n) in every step, or use view='mirrored'"
            ) from error
        self.differ = len(set(everyone)) > 1

    def _compare_in_engine(self, shape: str) -> None:
        checksum = self._backend.from_numpy(np.array([zlib.crc32(shape.encode())]))
        self.differ = len({int(gathered.numpy()[0]) for gathered in self._backend.all_gather(checksum)}) > 1

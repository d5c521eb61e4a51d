"""Which rank sees which sample when: a pure function of (seed, epoch, sizes), so every backend and resume agrees."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from unidist.data.batch import Batch
from unidist.errors import UsageError

Tail = Literal["keep", "pad", "drop"]
Indices = np.ndarray[Any, np.dtype[np.int64]]


class Rows(NamedTuple):
    """One rank's part of one global batch: the first `real` rows are samples, the rest is padding."""

    indices: Indices
    real: int
    total: int  # real samples on all ranks together


class Epoch:
    """One pass over `size` samples. Global batch i holds the same samples at every world size.

    The last, incomplete global batch is shared out evenly, larger parts first ("keep"), filled up on every rank
    with repeated samples that weigh nothing ("pad"), or left out ("drop"). With "keep", a rank for which nothing
    is left gets one row of padding, so that every rank takes part in every step.
    """

    def __init__(self, size: int, batch: Batch, *, number: int, shuffle: bool, seed: int, tail: Tail) -> None:
        if tail not in ("keep", "pad", "drop"):
            raise UsageError(f"tail is {tail!r}, it must be 'keep', 'pad' or 'drop'")
        self.size, self.batch, self.number, self.tail = size, batch, number, tail
        self.full_steps, self.left_over = divmod(size, batch.global_batch)
        self.steps = self.full_steps + (self.left_over > 0 and tail != "drop")
        if self.steps == 0:
            raise UsageError(
                f"{size} samples do not fill one global batch of {batch.global_batch} and tail='drop' leaves nothing: "
                "use a smaller batch, or tail='keep'"
            )
        self._key = (seed, number) if shuffle else None

    @cached_property
    def order(self) -> Indices:
        """The samples as they come, all ranks together."""
        return permutation(self.size, *self._key) if self._key else np.arange(self.size, dtype=np.int64)

    @cached_property
    def _full(self) -> Indices:
        """The complete global batches as [step, rank, row]."""
        full = self.order[: self.full_steps * self.batch.global_batch]
        return full.reshape(self.full_steps, self.batch.workers, self.batch.per_worker)

    def rows(self, rank: int, step: int) -> Rows:
        if step < self.full_steps:
            return Rows(self._full[step, rank], self.batch.per_worker, self.batch.global_batch)
        share, larger = divmod(self.left_over, self.batch.workers)
        real = share + (rank < larger)
        begin = self.full_steps * self.batch.global_batch + rank * share + min(rank, larger)
        length = self.batch.per_worker if self.tail == "pad" else max(real, 1)
        padding = np.resize(self.order, length - real)  # repeats the order as often as needed
        return Rows(np.concatenate([self.order[begin : begin + real], padding]), real, self.left_over)

    def indices(self, rank: int, first: int, stop: int) -> Indices:
        """The rows of steps `first` to before `stop`, one after the other."""
        full = self._full[first : min(stop, self.full_steps), rank].reshape(-1)
        return full if stop <= self.full_steps else np.concatenate([full, self.rows(rank, stop - 1).indices])

    def real(self, rank: int, first: int, stop: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """For each of `indices`, whether it is a sample (True) or padding."""
        mask = np.ones(len(self.indices(rank, first, stop)), dtype=bool)
        if stop > self.full_steps:
            last = self.rows(rank, stop - 1)
            mask[len(mask) - (len(last.indices) - last.real) :] = False
        return mask


def permutation(size: int, seed: int, epoch: int) -> Indices:
    """All of range(size) in an order fixed by (seed, epoch).

    Samples are sorted by a 64-bit hash of their index. NumPy's own generators may change their streams between
    versions, and the backends' environments hold different ones.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    keys = np.array([seed, epoch], dtype=np.int64).astype(np.uint64)
    key = _mix(_mix(keys[:1] + golden) + (keys[1:] + golden))
    return np.argsort(_mix(key + np.arange(size, dtype=np.uint64) * golden), kind="stable").astype(np.int64, copy=False)


def _mix(x: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """The finalizer of splitmix64: every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray[Any, np.dtype[np.uint64]] = x ^ (x >> np.uint64(31))
    return mixed

"""Which rank sees which sample when: a pure function of (seed, epoch, sizes), so every backend and resume agrees."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from unidist.data.batch import Batch
from unidist.errors import UsageError

Tail = Literal["keep", "pad", "drop"]
Indices = np.ndarray[Any, np.dtype[np.int64]]


class Counts(NamedTuple):
    """One rank's part of one global batch: `rows` are delivered, the first `real` of them samples, the rest padding."""

    real: int
    rows: int
    total: int  # real samples on all ranks together


class Epoch:
    """One pass over `size` samples, from the `start`-th on. Global batch i holds the same ones at every world size.

    The last, incomplete global batch is shared out evenly, larger parts first ("keep"), filled up on every rank
    with repeated samples that weigh nothing ("pad"), or left out ("drop"). With "keep", a rank for which nothing
    is left gets one row of padding, so that every rank takes part in every step.
    """

    def __init__(
        self, size: int, batch: Batch, *, number: int, shuffle: bool, seed: int, tail: Tail, start: int = 0
    ) -> None:
        if tail not in ("keep", "pad", "drop"):
            raise UsageError(f"tail is {tail!r}, it must be 'keep', 'pad' or 'drop'")
        self.size, self.batch, self.number, self.tail, self.start = size, batch, number, tail, start
        self.full_steps, self.left_over = divmod(size - start, batch.global_batch)
        self.steps = self.full_steps + (self.left_over > 0 and tail != "drop")
        if self.steps == 0 and start == 0:
            raise UsageError(
                f"{size} samples do not fill one global batch of {batch.global_batch} and tail='drop' leaves nothing: "
                "use a smaller batch, or tail='keep'"
            )
        self._key = (seed, number) if shuffle else None

    @property
    def key(self) -> tuple[object, ...]:
        """Two passes with the same key bring the same samples in the same order."""
        return (self.size, self.batch, self.tail, self.start, self._key)

    @cached_property
    def order(self) -> Indices:
        """The samples as they come, all ranks together."""
        order = permutation(self.size, *self._key) if self._key else np.arange(self.size, dtype=np.int64)
        return order[self.start :]

    @cached_property
    def _full(self) -> Indices:
        """The complete global batches as [step, rank, row]."""
        full = self.order[: self.full_steps * self.batch.global_batch]
        return full.reshape(self.full_steps, self.batch.workers, self.batch.per_worker)

    def counts(self, rank: int, step: int) -> Counts:
        if step < self.full_steps:
            return Counts(self.batch.per_worker, self.batch.per_worker, self.batch.global_batch)
        share, larger = divmod(self.left_over, self.batch.workers)
        real = share + (rank < larger)
        return Counts(real, self.batch.per_worker if self.tail == "pad" else max(real, 1), self.left_over)

    def rows(self, rank: int, step: int) -> Indices:
        """The samples of one rank in one step; padding comes last."""
        if step < self.full_steps:
            full: Indices = self._full[step, rank]
            return full
        real, rows, _ = self.counts(rank, step)
        share, larger = divmod(self.left_over, self.batch.workers)
        begin = self.full_steps * self.batch.global_batch + rank * share + min(rank, larger)
        padding = np.resize(self.order, rows - real)  # repeats the order as often as needed
        return np.concatenate([self.order[begin : begin + real], padding])

    def indices(self, rank: int, first: int, stop: int) -> Indices:
        """The rows of steps `first` to before `stop`, one after the other."""
        full = self._full[first : min(stop, self.full_steps), rank].reshape(-1)
        return full if stop <= self.full_steps else np.concatenate([full, self.rows(rank, stop - 1)])

    def real(self, rank: int, first: int, stop: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """For each of `indices`, whether it is a sample (True) or padding."""
        mask = np.ones(len(self.indices(rank, first, stop)), dtype=bool)
        if stop > self.full_steps:
            real, rows, _ = self.counts(rank, stop - 1)
            mask[len(mask) - (rows - real) :] = False
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

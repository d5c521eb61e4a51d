"""The loader over data without a length: the pass ends when every rank has run out."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unidist.data.batch import Batch
from unidist.data.loader import Loader
from unidist.data.order import Tail
from unidist.data.source import NativeLoader, Share
from unidist.data.tracking import BatchInfo, OnBatch, Pass, cut, next_pass, reached
from unidist.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from unidist.backend import Backend

# Seconds that a thread of one rank may be ahead of another's.
PATIENCE = 3600.0

_loaders = itertools.count()


class StreamLoader(Loader):
    """Every rank reads the whole stream and keeps its part (see `source.elements_of`), so
    global batches hold the same elements at every world size. Nobody knows the length: before each step the ranks count
    the next batch together, one small collective. `state()` counts elements; resuming reads past them.

    Parted data gives every rank a part of its own, and these may differ in size: all make as many steps as the longest
    has, or each its own number where ranks are not in lockstep. `state()` counts places in batches, taken or not, and
    is good for the same number of ranks.
    """

    def __init__(
        self,
        native: NativeLoader,
        batch: Batch,
        on_batch: OnBatch,
        backend: Backend,
        *,
        tail: Tail,
        gather: Callable[[int], list[int]],
    ) -> None:
        if tail == "pad":
            raise UsageError("tail='pad' needs to know the end of the data: a stream takes 'keep' or 'drop'")
        super().__init__(batch, on_batch)
        self._native, self._backend = native, backend
        self._drop, self._gather = tail == "drop", gather
        self._number, self._counted = next(_loaders), 0  # of this loader, and how often its ranks have counted
        self._alone = native.parted and backend.capabilities.lockstep is not True  # nobody waits for the others

    def __iter__(self) -> Iterator[Any]:
        number, start = self.epoch, self._start
        self.epoch, self._start = self.epoch + 1, 0
        return self._pass(number, start)

    def _pass(self, number: int, start: int) -> Iterator[Any]:
        rank = self._backend.world.rank
        places = range(rank * self.batch.per_worker, (rank + 1) * self.batch.per_worker)
        skipping = replace(self._native, stream=Share(start, self.batch.global_batch, places, number))
        self._place = (number, start)
        handed_out: list[tuple[int, int]] = []
        origin = Pass(weakref.ref(self), counts=handed_out)
        self._passes = next_pass(self._passes, origin)
        with self._backend.read_batches(skipping, None) as reading:
            coming, counts = self._next(reading)
            self._check_first(counts, start)
            consumed = start
            rows, batch = coming
            while self._goes_on(counts):
                # A rank that has run out repeats a row, which weighs nothing: cut off, so that it is another array.
                rows, batch = coming if coming[0] else (1, cut(batch, rows, 1))
                real, total, even = coming[0], sum(counts), min(counts) == max(counts)
                coming, counts = self._next(reading)
                begin = consumed
                consumed += self.batch.global_batch if self._native.parted else total
                last = not self._goes_on(counts)
                handed_out.append((real, rows))
                origin.steps += 1
                info = BatchInfo(
                    origin, origin.steps - 1, self.batch, rows, real, total, last, even, begins_at=(number, begin)
                )
                self._on_batch(info, batch)
                # Only now: the loop may ask for its place while a thread reads this batch, which is still to come.
                self._place = (number + 1, 0) if last else (number, consumed)
                yield batch

    def _goes_on(self, counts: list[int]) -> bool:
        return min(counts) == self.batch.per_worker if self._drop else any(counts)

    def _next(self, reading: Iterator[Any]) -> tuple[tuple[int, Any], list[int]]:
        """((elements, batch) of this rank, elements of each rank)."""
        mine = next(reading, (0, None))
        if self._alone:
            return mine, [mine[0]] * self.batch.workers
        self._counted += 1
        peers = self._backend.world.peers
        if peers is None or threading.current_thread() is threading.main_thread():
            return mine, self._gather(mine[0])
        # The engine may be in the middle of a step, and takes operations in one order only.
        return mine, peers.gather(f"stream {self._number}/{self._counted}", mine[0], PATIENCE)

    def _check_first(self, counts: list[int], start: int) -> None:
        """Every rank has the counts, so every rank raises."""
        if not any(counts) and start == 0:
            raise UsageError(
                "the stream gave no elements. A generator can be read only once: pass an object that begins anew"
            )
        resumed = self._native.parted and start > 0  # a part that was read before then gives a row to take part with
        if any(counts) and not all(counts) and not self._drop and not resumed:
            raise UsageError(
                f"the data has too few elements for {self.batch}: the ranks have {counts}. Use a smaller batch, or "
                "fewer ranks."
            )

    def state(self) -> dict[str, Any]:
        epoch, samples = reached(self._passes, self._place)
        parts = {"parts": self.batch.workers, "seed": self._native.seed} if self._native.parted else {}
        return {"epoch": epoch, "samples": samples, **parts}

    def load_state(self, state: Mapping[str, Any]) -> None:
        if self._native.parted and state["samples"]:
            there, here = (state.get("parts"), state.get("seed")), (self.batch.workers, self._native.seed)
            if there != here or state["samples"] % self.batch.global_batch:
                raise CheckpointError(
                    f"the loader's position is inside a pass over {there[0]} parts with seed {there[1]}, and here are "
                    f"{here[0]} parts with seed {here[1]}, {self.batch}: resume as it was, or from the end of an epoch"
                )
        super().load_state(state)

"""The loader over data without a length: the pass ends when every rank has run out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unidist.data.batch import Batch
from unidist.data.loader import Drawn, Listener
from unidist.data.order import Tail
from unidist.data.source import OwnLoader, Share
from unidist.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from unidist.backend import Backend


class StreamLoader:
    """Iterate it like a `Loader`. Every rank reads the whole stream and keeps its part (see `source.elements_of`), so
    global batches hold the same elements at every world size. Nobody knows the length: before each step the ranks count
    the next batch together, one small collective. `state()` counts elements; resuming reads past them.

    Parted data gives every rank a part of its own, and these may differ in size: all make as many steps as the longest
    has, or each its own number where ranks are not in lockstep. `state()` counts places in batches, taken or not, and
    is good for the same number of ranks.
    """

    def __init__(
        self,
        own: OwnLoader,
        batch: Batch,
        listener: Listener,
        backend: Backend,
        *,
        tail: Tail,
        gather: Callable[[int], list[int]],
    ) -> None:
        if tail == "pad":
            raise UsageError("tail='pad' needs to know the end of the data: a stream takes 'keep' or 'drop'")
        self.batch, self.epoch = batch, 0
        self._own, self._listener, self._backend = own, listener, backend
        self._drop, self._gather = tail == "drop", gather
        if own.parted and backend.capabilities.lockstep is not True:
            self._gather = lambda count: [count] * batch.workers  # nobody waits for the others
        self._start, self._place = 0, (0, 0)

    def set_epoch(self, epoch: int) -> None:
        """Number the next pass. A stream has no order of its own to change: this only counts."""
        self.epoch, self._start, self._place = epoch, 0, (epoch, 0)

    def __iter__(self) -> Iterator[Any]:
        number, start = self.epoch, self._start
        self.epoch, self._start = self.epoch + 1, 0
        return self._pass(number, start)

    def _pass(self, number: int, start: int) -> Iterator[Any]:
        rank, origin = self._backend.world.rank, object()
        places = range(rank * self.batch.per_worker, (rank + 1) * self.batch.per_worker)
        skipping = replace(self._own, stream=Share(start, self.batch.global_batch, places, number))
        self._place = (number, start)
        with self._backend.read_batches(skipping, None) as reading:
            try:
                coming, counts = self._next(reading)
                self._check_first(counts, start)
                consumed, step = start, 0
                rows, batch = coming
                while self._goes_on(counts):
                    # A rank that has run out repeats its last batch, which weighs nothing.
                    rows, batch = coming if coming[0] else (rows, batch)
                    real, total, uneven = coming[0], sum(counts), min(counts) != max(counts)
                    coming, counts = self._next(reading)
                    consumed += self.batch.global_batch if self._own.parted else total
                    last = not self._goes_on(counts)
                    self._place = (number + 1, 0) if last else (number, consumed)
                    self._listener.on_batch(Drawn(origin, self.batch, step, rows, real, total, last, uneven), batch)
                    step += 1
                    yield batch
            finally:
                self._listener.on_end(origin)

    def _goes_on(self, counts: list[int]) -> bool:
        return min(counts) == self.batch.per_worker if self._drop else any(counts)

    def _next(self, reading: Iterator[Any]) -> tuple[tuple[int, Any], list[int]]:
        """((elements, batch) of this rank, elements of each rank)."""
        own = next(reading, (0, None))
        return own, self._gather(own[0])

    def _check_first(self, counts: list[int], start: int) -> None:
        """Every rank has the counts, so every rank raises."""
        if not any(counts) and start == 0:
            raise UsageError(
                "the stream gave no elements. A generator can be read only once: pass an object that begins anew"
            )
        resumed = self._own.parted and start > 0  # a part that was read before then gives a row to take part with
        if any(counts) and not all(counts) and not self._drop and not resumed:
            raise UsageError(
                f"the data has too few elements for {self.batch}: the ranks have {counts}. Use a smaller batch, or "
                "fewer ranks."
            )

    def state(self) -> dict[str, Any]:
        epoch, samples = self._place
        parts = {"parts": self.batch.workers, "seed": self._own.seed} if self._own.parted else {}
        return {"epoch": epoch, "samples": samples, **parts}

    def load_state(self, state: Mapping[str, Any]) -> None:
        if self._own.parted and state["samples"]:
            there, here = (state.get("parts"), state.get("seed")), (self.batch.workers, self._own.seed)
            if there != here or state["samples"] % self.batch.global_batch:
                raise CheckpointError(
                    f"the loader's position is inside a pass over {there[0]} parts with seed {there[1]}, and here are "
                    f"{here[0]} parts with seed {here[1]}, {self.batch}: resume as it was, or from the end of an epoch"
                )
        self.epoch, self._start = int(state["epoch"]), int(state["samples"])
        self._place = (self.epoch, self._start)

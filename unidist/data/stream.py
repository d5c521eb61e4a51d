"""The loader over data without a length: the pass ends when every rank has run out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unidist.data.batch import Batch
from unidist.data.loader import Drawn, Listener
from unidist.data.order import Tail
from unidist.data.source import OwnLoader
from unidist.errors import UsageError

if TYPE_CHECKING:
    from unidist.backend import Backend


class StreamLoader:
    """Iterate it like a `Loader`. Every rank reads the whole stream and keeps its part (see `source.elements_of`), so
    global batches hold the same elements at every world size. Nobody knows the length: before each step the ranks count
    the next batch together, one small collective. `state()` counts elements; resuming reads past them.
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
        share = range(rank * self.batch.per_worker, (rank + 1) * self.batch.per_worker)
        skipping = replace(self._own, stream=(start, self.batch.global_batch, share))
        self._place = (number, start)
        with self._backend.read_batches(skipping, None) as reading:
            try:
                coming, real, counts = self._next(reading, None)
                consumed, step = start, 0
                while self._goes_on(counts):
                    batch, own, total = coming, real, sum(counts)
                    coming, real, counts = self._next(reading, batch)
                    consumed += total
                    last = not self._goes_on(counts)
                    self._place = (number + 1, 0) if last else (number, consumed)
                    rows = _rows(batch)
                    self._listener.on_batch(Drawn(origin, self.batch, step, rows, own, total, last))
                    step += 1
                    yield batch
            finally:
                self._listener.on_end(origin)

    def _goes_on(self, counts: list[int]) -> bool:
        return min(counts) == self.batch.per_worker if self._drop else any(counts)

    def _next(self, reading: Iterator[Any], before: Any) -> tuple[Any, int, list[int]]:
        """(batch, samples in it, samples of each rank). A rank that has run out repeats one, which weighs nothing."""
        batch = next(reading, None)
        real = 0 if batch is None else _rows(batch)
        counts = self._gather(real)
        if batch is None and before is None and any(counts):
            raise UsageError(
                f"the stream has fewer elements than ranks x batch ({self.batch}): rank {self._backend.world.rank} has "
                "nothing to work on. Use a smaller batch."
            )
        return (before if batch is None else batch), real, counts

    def state(self) -> dict[str, Any]:
        epoch, samples = self._place
        return {"epoch": epoch, "samples": samples}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.epoch, self._start = int(state["epoch"]), int(state["samples"])
        self._place = (self.epoch, self._start)


def _rows(batch: Any) -> int:
    """How many samples a collated batch holds."""
    while isinstance(batch, (list, tuple, dict)):
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    return len(batch)

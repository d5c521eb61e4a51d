"""The loader that users iterate: epochs, position, and what each batch means to a training step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from unidist.data.batch import Batch
from unidist.data.order import Epoch, Tail
from unidist.data.source import Source
from unidist.errors import CheckpointError, UsageError


class Drawn(NamedTuple):
    """The batch that a loader has just handed out."""

    origin: object  # the pass that it belongs to: an Epoch, where the order is known
    batch: Batch
    step: int
    rows: int  # as delivered
    real: int  # of these, samples
    total: int  # samples on all ranks
    last: bool
    uneven: bool  # the ranks hold different numbers of samples

    @property
    def weight(self) -> float:
        """Factor that makes the mean over ranks of local mean losses the mean over the global batch."""
        return self.real * self.batch.workers / self.total


class Listener(NamedTuple):
    """Who is told: weights of training batches and the order in `gather` depend on it."""

    on_batch: Callable[[Drawn, Any], None]  # with the batch itself
    on_end: Callable[[object], None]  # the pass was finished, or left


class Loader:
    """Iterate it: each full pass is a new epoch with a new order, and every rank makes the same number of steps.

    Attributes: `batch` (the arithmetic), `epoch` (number of the next pass), `size` (samples in the data set) and
    `len()` (steps in the next pass). A pass that is left early is over: the next one is a new epoch. Until that
    begins, `state()` is the place where it was left, and a run that resumes from it goes on there.
    """

    def __init__(
        self, source: Source, batch: Batch, listener: Listener, *, rank: int, shuffle: bool, seed: int, tail: Tail
    ) -> None:
        self.size, self.batch, self.epoch = source.size, batch, 0
        self._source, self._listener = source, listener
        self._rank, self._shuffle, self._seed, self._tail = rank, shuffle, seed, tail
        self._start = 0  # samples of the next pass that were consumed before a resume
        self._place = (0, 0)  # (epoch, samples consumed in it)
        self._plan()  # refuses what cannot work, now

    def _plan(self) -> Epoch:
        return Epoch(
            self.size,
            self.batch,
            number=self.epoch,
            shuffle=self._shuffle,
            seed=self._seed,
            tail=self._tail,
            start=self._start,
        )

    def __len__(self) -> int:
        return self._plan().steps

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass the one numbered `epoch`. Only needed to repeat or to skip: passes count themselves."""
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise UsageError(f"epoch is {epoch!r}, it must be a whole number from 0")
        self.epoch, self._start, self._place = epoch, 0, (epoch, 0)

    def __iter__(self) -> Iterator[Any]:
        plan = self._plan()
        self._place = (self.epoch, self._start) if plan.steps else (self.epoch + 1, 0)
        self.epoch, self._start = self.epoch + 1, 0
        return self._pass(plan)

    def _pass(self, plan: Epoch) -> Iterator[Any]:
        reading = self._source.read(plan, self._rank)
        try:
            for step, batch in enumerate(reading):
                real, rows, total = plan.counts(self._rank, step)
                last = step == plan.steps - 1
                consumed = plan.start + step * self.batch.global_batch + total
                self._place = (plan.number + 1, 0) if last else (plan.number, consumed)
                # Told before the batch is handed out: the loop body that follows belongs to it.
                uneven = total % self.batch.workers != 0  # a batch is shared out as evenly as can be
                self._listener.on_batch(Drawn(plan, self.batch, step, rows, real, total, last, uneven), batch)
                yield batch
        finally:  # also when the loop was left early
            reading.close()
            self._listener.on_end(plan)

    def state(self) -> dict[str, Any]:
        """Where the loader is, in samples of all ranks: good on any number of them."""
        epoch, samples = self._place
        return {"epoch": epoch, "samples": samples, "size": self.size, "shuffle": self._shuffle, "seed": self._seed}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken, on this or another number of ranks."""
        own = self.state()
        different = [f"{key} {state.get(key)} there, {own[key]} here" for key in ("size", "shuffle", "seed")
                     if state.get(key) != own[key]]  # fmt: skip
        if different:
            raise CheckpointError(f"the loader's position is of another order of samples: {', '.join(different)}")
        self.epoch, self._start = int(state["epoch"]), int(state["samples"])
        self._place = (self.epoch, self._start)

"""The loader that users iterate: epochs, position, and what each batch means to a training step."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from unidist.checks import check_whole
from unidist.data.batch import Batch
from unidist.data.order import Epoch, Tail
from unidist.data.source import Source
from unidist.data.tracking import BatchInfo, OnBatch, Pass, next_pass, reached
from unidist.errors import CheckpointError


class Loader(ABC):
    """Iterate it: each full pass is a new epoch, and every rank makes the same number of steps.

    Attributes: `batch` (the arithmetic) and `epoch` (number of the next pass). A pass that is left early is over: the
    next one is a new epoch. Until that begins, `state()` is the place where it was left, and a run that resumes from it
    goes on there.
    """

    def __init__(self, batch: Batch, on_batch: OnBatch) -> None:
        self.batch, self.epoch, self._on_batch = batch, 0, on_batch
        self._start = 0  # samples of the next pass that were consumed before a resume
        self._place = (0, 0)  # (epoch, samples consumed in it)
        self._passes: list[Pass] = []  # the one that was begun last, and those of which batches are still waiting

    @abstractmethod
    def __iter__(self) -> Iterator[Any]: ...

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass the one numbered `epoch`. Only needed to repeat or to skip: passes count themselves."""
        check_whole("epoch", epoch, 0)
        self.epoch, self._start, self._place, self._passes = epoch, 0, (epoch, 0), []

    @property
    def latest(self) -> Pass | None:
        """The pass that was begun last."""
        return self._passes[-1] if self._passes else None

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Where training is, in samples of all ranks. Batches that were read ahead, and that no step was made of yet,
        are still to come."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken."""
        self.epoch, self._start = int(state["epoch"]), int(state["samples"])
        self._place, self._passes = (self.epoch, self._start), []


class IndexedLoader(Loader):
    """Over samples that have numbers, in a new order in each epoch; the position is good on any number of ranks.

    `size` is the number of samples in the data set, and `len()` of steps in the next pass.
    """

    def __init__(
        self, source: Source, batch: Batch, on_batch: OnBatch, *, rank: int, shuffle: bool, seed: int, tail: Tail
    ) -> None:
        super().__init__(batch, on_batch)
        self.size, self._source = source.size, source
        self._rank, self._shuffle, self._seed, self._tail = rank, shuffle, seed, tail
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

    def __iter__(self) -> Iterator[Any]:
        plan = self._plan()
        self._place = (self.epoch, self._start) if plan.steps else (self.epoch + 1, 0)
        self.epoch, self._start = self.epoch + 1, 0
        return self._pass(plan)

    def _pass(self, plan: Epoch) -> Iterator[Any]:
        reading = self._source.read(plan, self._rank)
        origin = Pass(weakref.ref(self), plan)
        self._passes = next_pass(self._passes, origin)
        try:
            for step, batch in enumerate(reading):
                real, rows, total = plan.counts(self._rank, step)
                last = step == plan.steps - 1
                begin = plan.start + step * self.batch.global_batch
                even = total % self.batch.workers == 0  # a batch is shared out as evenly as can be
                origin.steps = step + 1
                info = BatchInfo(
                    origin, step, self.batch, rows, real, total, last, even, begins_at=(plan.number, begin)
                )
                self._on_batch(info, batch)
                # Only now: the loop may ask for its place while a thread reads this batch, which is still to come.
                self._place = (plan.number + 1, 0) if last else (plan.number, begin + total)
                yield batch
        finally:  # also when the loop was left early
            reading.close()

    def state(self) -> dict[str, Any]:
        epoch, samples = reached(self._passes, self._place)
        return {"epoch": epoch, "samples": samples, "size": self.size, "shuffle": self._shuffle, "seed": self._seed}

    def load_state(self, state: Mapping[str, Any]) -> None:
        current = self.state()
        different = [f"{key} {state.get(key)} there, {current[key]} here" for key in ("size", "shuffle", "seed")
                     if state.get(key) != current[key]]  # fmt: skip
        if different:
            raise CheckpointError(f"the loader's position is of another order of samples: {', '.join(different)}")
        super().load_state(state)

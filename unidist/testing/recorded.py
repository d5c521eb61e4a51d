"""A training that remembers its batches, to be compared with one process; data for it, and ways to read it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from unidist.optim import SGD
from unidist.testing import reference
from unidist.testing.case import Case

Array = np.ndarray[Any, Any]
RATE = 0.5


class Recorded:
    """Trains a model, and remembers what each step was made of, so that one process can do the same afterwards."""

    def __init__(self, case: Case, accumulate: int = 1, loss_fn: Callable[..., Any] | None = None) -> None:
        self.case, self._accumulate = case, accumulate
        self.model, self.optimizer = case.strategy.prepare(case.mlp(), SGD(RATE), accumulate=accumulate)
        self.step = case.strategy.train_step(self.model, self.optimizer, loss_fn or case.zoo.cross_entropy)
        self.rows: list[tuple[Array, Array]] = []

    def __call__(self, x: Any, y: Any, *, real: int | None = None, times: int = 1, **how: Any) -> Any:
        """`real` rows of the batch are samples; each counts `times`."""
        self.remember(x, y, real, times)
        return self.step(x, y, **how)

    def remember(self, x: Any, y: Any, real: int | None = None, times: int = 1) -> None:
        rows = (np.repeat(self.case.backend.to_numpy(array)[:real], times, axis=0) for array in (x, y))
        self.rows.append(tuple(rows))  # type: ignore[arg-type]

    def is_serial(self, groups: Iterable[int] | None = None) -> None:
        """Compare with one process that makes an update of the rows of all ranks in each group of so many steps."""
        steps = len(self.rows)
        if groups is None:
            groups = [self._accumulate] * (steps // self._accumulate)
        serial, begin = reference.Serial(reference.weights(), SGD(RATE)), 0
        everyone = self.gather()
        for count in groups:
            chosen = [rank[n] for n in range(begin, begin + count) for rank in everyone]
            if any(len(y) for _, y in chosen):
                serial.step(np.concatenate([x for x, _ in chosen]), np.concatenate([y for _, y in chosen]))
            begin += count
        assert begin == steps, f"{steps} steps were made, the groups hold {begin}"
        self.case.close_to_serial(self.model, serial)

    def gather(self) -> list[list[tuple[Array, Array]]]:
        """What every rank has remembered; their batches differ in size, so they travel padded."""
        gather, counts = self.case.strategy.all_gather, np.array([len(y) for _, y in self.rows])
        counts_of_all = gather(counts)
        longest = max(int(counts.max()) for counts in counts_of_all)
        x = np.stack([np.pad(x, ((0, longest - len(x)), (0, 0))) for x, _ in self.rows])
        y = np.stack([np.pad(y, (0, longest - len(y))) for _, y in self.rows])
        together = zip(counts_of_all, gather(x), gather(y), strict=True)
        return [
            [(xs[step, :count], ys[step, :count]) for step, count in enumerate(counts)] for counts, xs, ys in together
        ]


def loader_of(case: Case, batches: int = 3, rest: int = 1, **how: Any) -> Any:
    """So many full global batches, and an incomplete one that leaves `rest` samples for each rank and one more."""
    whole = 4 * case.backend.devices * case.size
    samples = whole * batches + rest * case.size + (case.size > 1)
    return case.strategy.loader(reference.data(samples), per_device_batch=4, shuffle=True, seed=3, **how)


def real_rows(case: Case, loader: Any) -> list[int]:
    """How many rows of each batch of a pass are samples."""
    plan = loader._plan()
    return [plan.counts(case.rank, step).real for step in range(plan.steps)]


def by_generator(batches: Iterable[Any]) -> Iterator[Any]:
    waiting = None
    for batch in batches:
        if waiting is not None:
            yield waiting
        waiting = batch
    yield waiting


def by_thread(batches: Iterable[Any]) -> Iterator[Any]:
    ready: queue.Queue[Any] = queue.Queue(2)

    def read() -> None:
        for batch in batches:
            ready.put(batch)
        ready.put(None)

    thread = threading.Thread(target=read)
    thread.start()
    while (batch := ready.get()) is not None:
        yield batch
    thread.join()


def own_rows(case: Case, step: int) -> tuple[Any, Any]:
    """Hand-made data, of another size on each rank."""
    x, y = reference.data(20, seed=50 + 10 * step + case.rank)
    rows = (2 + (case.rank + step) % 3) * case.backend.devices
    return case.backend.from_numpy(x[:rows].copy()), case.backend.from_numpy(y[:rows].copy())

"""Batches that do not show what they weigh: in containers or closures, of several loaders, changed, with other axes."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import numpy as np

from unidist.errors import UsageError
from unidist.optim import SGD
from unidist.testing import reference
from unidist.testing.case import Case, DoesNotApply, check, refused
from unidist.testing.recorded import RATE, Recorded, loader_of, own_rows, real_rows


@dataclass(frozen=True)
class Pair:
    x: Any
    y: Any


class Encoding(UserDict[str, Any]):
    """A mapping that is no dict, as tokenizers give it, and whose items are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["data"][name]
        except KeyError:
            raise AttributeError(name) from None


@check
def batches_in_containers_of_ones_own(case: Case) -> None:
    """In a dataclass, or in a mapping that is no dict: their arrays are found, padding is left out."""
    for kind in (Pair, Encoding):
        for accumulate in (1, 2):
            train = Recorded(case, accumulate)
            step = case.strategy.train_step(
                train.model, train.optimizer, lambda m, batch: case.zoo.cross_entropy(m, batch.x, batch.y)
            )
            for x, y in (own_rows(case, n) for n in range(2)):
                train.remember(x, y)
                step(kind(x=x, y=y))
            loader = loader_of(case, batches=3, tail="pad")
            for (x, y), real in zip(loader, real_rows(case, loader), strict=True):
                train.remember(x, y, real)
                step(kind(x=x, y=y))
            train.is_serial()


@check
def batch_in_a_closure_is_refused(case: Case) -> None:
    """Unless its weight is told."""
    train = Recorded(case, accumulate=2)
    x, y = own_rows(case, 0)
    step = case.strategy.train_step(train.model, train.optimizer, lambda m: case.zoo.cross_entropy(m, x, y))
    with refused(UsageError, "step(…, weight=n)"):
        step()
    if case.backend.devices == 1:
        for n in range(2):
            x, y = own_rows(case, n)
            train.remember(x, y)
            step(weight=int(x.shape[0]))
        train.is_serial()


@check
def batches_of_two_loaders_in_one_step(case: Case) -> None:
    """One of them ends unevenly: a weight that is right for one loss is wrong for the other. In a sum there is none."""
    together = case.size > 1 and case.strategy.capabilities.lockstep is True

    def losses(m: Any, a: Any, b: Any, x: Any, y: Any) -> Any:
        return case.zoo.cross_entropy(m, a, b) + case.zoo.cross_entropy(m, x, y)

    def pairs() -> list[Any]:
        first, second = loader_of(case, batches=3, rest=0, tail="drop"), loader_of(case, batches=2)
        return [(*one, *two) for one, two in zip(first, second, strict=True)]

    for accumulate in (1, 2):
        train, batches = Recorded(case, accumulate), pairs()
        step = case.strategy.train_step(train.model, train.optimizer, losses)
        for batch in batches[:-1]:
            step(*batch)
        if together or accumulate > 1:
            with refused(UsageError, "tail='drop'", "reduction='sum'"):
                step(*batches[-1])
        if case.strategy.capabilities.spelled_out is True and together:
            with case.strategy.forward(train.model):
                loss = losses(train.model, *batches[-1])
            with refused(UsageError, "tail='drop'"):
                case.strategy.backward(loss)
    if together and case.backend.devices == 1:
        rate = 0.02
        model, optimizer = case.strategy.prepare(case.mlp(), SGD(rate))
        step = case.strategy.train_step(
            model,
            optimizer,
            lambda m, a, b, x, y: (
                case.zoo.cross_entropy(m, a, b) * float(b.shape[0])
                + case.zoo.cross_entropy(m, x, y) * float(y.shape[0])
            ),
            reduction="sum",
        )
        recorded, serial = Recorded(case), reference.Serial(reference.weights(), SGD(rate))
        for a, b, x, y in pairs():
            step(a, b, x, y)
            for pair in ((a, b), (x, y)):
                recorded.remember(*pair)
        everyone = recorded.gather()
        for n in range(0, len(everyone[0]), 2):
            rows = [rank[m] for rank in everyone for m in (n, n + 1)]
            x, y = (np.concatenate([row[part] for row in rows]) for part in (0, 1))
            _, gradients = serial.loss_and_gradients(x, y)
            serial.apply([gradient * len(y) for gradient in gradients])
        case.close_to_serial(model, serial)


@check
def told_weight_of_padding_that_was_changed_is_refused(case: Case) -> None:
    """Whoever counts its rows counts padding. A rank that says 0 adds nothing."""
    if case.backend.devices > 1:
        raise DoesNotApply("a told weight is refused where one process drives several devices")
    train, batches = Recorded(case), list(loader_of(case, batches=1, tail="pad"))
    train(*batches[0])
    x, y = (batch * 1 for batch in batches[1])
    for how in ({"weight": int(x.shape[0])}, {}):
        with refused(UsageError, "padding", "tail='drop'", "weight=0"):
            train.step(x, y, **how)
    train.step(x, y, weight=0)
    train.is_serial()


@check
def weight_that_is_a_tensor(case: Case) -> None:
    """As `mask.sum()` is."""
    if case.backend.devices > 1:
        raise DoesNotApply("a told weight is refused where one process drives several devices")
    train = Recorded(case)
    for step in range(3):
        x, y = own_rows(case, step)
        train(x, y, weight=case.backend.from_numpy(np.ones(int(x.shape[0]), np.float32)).sum())
    train.is_serial()
    with refused(UsageError, "weight"):
        train.step(x, y, weight=x)


@check
def other_axes_that_were_seen_before_are_compared(case: Case) -> None:
    """Time first, samples second: (4, 4), then (4, 2), and then one of them on each rank."""
    case.requires("lockstep")
    case.needs_ranks(2)
    model, optimizer = case.strategy.prepare(case.mlp(), SGD(RATE))
    step = case.strategy.train_step(
        model, optimizer, lambda m, x, y: case.zoo.cross_entropy(m, x.reshape((-1, 6)), y.reshape((-1,)))
    )

    def batch(samples: int) -> tuple[Any, Any]:
        x, y = reference.data(4 * samples, seed=case.rank)
        return case.backend.from_numpy(x.reshape(4, samples, 6)), case.backend.from_numpy(y.reshape(4, samples))

    for samples in (4, 2, 4):
        step(*batch(samples))
    with refused(UsageError, "weight=len(x)"):
        step(*batch(4 if case.rank == 0 else 2))

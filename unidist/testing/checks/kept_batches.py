"""Batches that a loop keeps: each rank may use them in an order of its own, and later than they were read."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np

from unidist.errors import UsageError
from unidist.testing import reference
from unidist.testing.case import Case, DoesNotApply, check, refused
from unidist.testing.recorded import Recorded, by_generator, by_thread, loader_of, real_rows


@check
def order_of_ones_own_on_each_rank(case: Case) -> None:
    """As PPO does with a rollout: the last batch of the loader comes at another step on each rank."""
    for accumulate in (1, 2):
        train, batches = Recorded(case, accumulate=accumulate), list(loader_of(case, batches=4))
        for walk in range(2):
            for number in np.roll(np.arange(len(batches)), 1 + case.rank + walk):
                train(*batches[number])
        train.is_serial([1] * 10 if accumulate == 1 else [2, 2, 1] * 2)


@check
def told_weight_of_a_rank_without_samples(case: Case) -> None:
    """A user who counts the rows counts the one of padding, too: it weighs nothing all the same."""
    if case.backend.devices > 1:
        raise DoesNotApply("a told weight is refused where one process drives several devices")
    train, loader = Recorded(case), loader_of(case, batches=2, rest=0)
    for (x, y), real in zip(loader, real_rows(case, loader), strict=True):
        train(x, y, real=real, weight=int(x.shape[0]))
    train.is_serial()
    batches = list(loader_of(case, batches=1, tail="pad"))
    with refused(UsageError, "padding"):
        train.step(*batches[1], weight=int(batches[1][0].shape[0]))


@check
def padding_that_was_multiplied_is_refused(case: Case) -> None:
    """Two views of each sample in one batch: nobody can see any more which rows are padding."""
    train, batches = Recorded(case), list(loader_of(case, batches=1, tail="pad"))
    train(*batches[0])
    twice = [case.backend.from_numpy(np.concatenate([case.backend.to_numpy(batch)] * 2)) for batch in batches[1]]
    with refused(UsageError, "weight"):
        train.step(*twice)


@check
def position_while_reading_into_the_next_pass(case: Case) -> None:
    """Batches of the pass before that still wait are the next ones after a resume."""
    train, loader = Recorded(case), loader_of(case, batches=3)
    reading = by_generator(chain(loader, loader))
    states, seen = [], []
    for _ in range(6):
        x, y = next(reading)
        train(x, y)
        seen.append(case.backend.to_numpy(x))
        states.append(loader.state())
    train.is_serial()
    for number, state in enumerate(states[:-1]):
        resumed = loader_of(case, batches=3)
        resumed.load_state(state)
        assert (case.backend.to_numpy(next(iter(resumed))[0]) == seen[number + 1]).all(), number


@check
def stream_read_by_a_thread(case: Case) -> None:
    """The ranks count its batches together, beside the collectives of the steps and of the loop."""
    case.requires("native_loader")
    whole = 4 * case.backend.devices * case.size
    train, stream = Recorded(case), zip(*reference.data(21 * whole - 1), strict=True)
    for n, (x, y) in enumerate(by_thread(case.strategy.loader(stream, per_device_batch=4))):
        train(x, y)
        if n % 5 == 0:
            assert case.strategy.mean(float(case.rank)) == (case.size - 1) / 2
    train.is_serial()


@check
def training_batch_that_is_read_during_an_evaluation(case: Case) -> None:
    """As by a thread: it waits for its step, and is the next one after a resume. Padding in it is not forgotten."""
    train, loader = Recorded(case), loader_of(case, batches=2, tail="pad")
    reals = real_rows(case, loader)
    for _ in range(2):  # also in a pass of which the first batch is read there
        batches: list[tuple[Any, Any]] = []
        reading = iter(loader)
        with case.strategy.evaluate(train.model):
            for x, _ in case.strategy.loader(reference.data(8 * case.backend.devices * case.size), per_device_batch=4):
                train.model(x)
                batches += [next(reading)] * (len(batches) < 2)
        train(*batches.pop(0))
        resumed = loader_of(case, batches=2, tail="pad")
        resumed.load_state(loader.state())
        assert (case.backend.to_numpy(next(iter(resumed))[0]) == case.backend.to_numpy(batches[0][0])).all()
        for x, y in [*batches, *reading]:
            train(x, y, real=reals[len(train.rows) % 3])
    train.is_serial()
    reading = iter(loader)
    with case.strategy.evaluate(train.model):
        for x, _ in case.strategy.loader(reference.data(2 * case.size), per_device_batch=2):
            train.model(x)
        batches = list(reading)
    for x, y in batches[:-1]:
        train(x, y)
    with refused(UsageError, "padding"):
        train.step(*(batch * 1 for batch in batches[-1]))

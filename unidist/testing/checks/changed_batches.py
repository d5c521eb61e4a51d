"""Batches that are changed between the loader and the step, and batches of which several steps are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unidist.errors import StateError, UsageError
from unidist.testing import reference
from unidist.testing.case import Case, check, refused
from unidist.testing.recorded import Recorded, loader_of, own_rows, real_rows


class Numbers:
    """A data set whose samples are their numbers: a collate function makes arrays of them."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, number: int) -> int:
        return number


def collated(case: Case, samples: int, collate: Callable[[list[int], Any, Any], Any], **how: Any) -> Any:
    x, y = reference.data(samples)

    def arrays(numbers: Any) -> tuple[Any, ...]:
        return tuple(map(case.backend.from_numpy, collate([int(number) for number in numbers], x, y)))

    return case.strategy.loader(Numbers(samples), per_device_batch=4, collate=arrays, **how)


@check
def collate_that_leaves_samples_out(case: Case) -> None:
    """How many are left can be seen in the arrays, but also be something else: it has to be told."""
    case.requires("native_loader")

    def some(numbers: list[int], x: Any, y: Any) -> Any:
        kept = [number for number in numbers if number % 4 != 1]
        return x[kept], y[kept]

    loader = collated(case, 16 * case.backend.devices * case.size, some)
    train = Recorded(case, accumulate=2)
    with refused(UsageError, "collate", "weight=n"):
        train.step(*next(iter(loader)))
    if case.backend.devices == 1:
        for x, y in loader:
            train(x, y, weight=int(x.shape[0]))
        train.is_serial()


@check
def several_rows_of_each_sample(case: Case) -> None:
    """Two views of each, made by a collate function, weigh as much as one."""
    case.requires("native_loader")
    views = collated(case, 12 * case.backend.devices * case.size, lambda n, x, y: (x[n + n], y[n + n]))
    train = Recorded(case, accumulate=2)
    for x, y in views:
        train(x, y)
    train.is_serial([2, 1])


@check
def padding_in_another_axis_is_refused(case: Case) -> None:
    """A step leaves padding out by cutting the first axis."""
    case.requires("native_loader")
    loader = collated(case, 3 * case.size, lambda n, x, y: (x[n].T.copy(), y[n].reshape(1, -1)), tail="pad")
    train = Recorded(case)
    with refused(UsageError, "padding", "first axis", "tail='keep'"):
        train.step(*next(iter(loader)))


@check
def padded_batch_used_as_it_is_and_changed(case: Case) -> None:
    """What was made of it cannot be told from data that is no loader's."""
    train, loader = Recorded(case), loader_of(case, batches=1, tail="pad")
    batches = list(loader)
    for (x, y), real in zip(batches, real_rows(case, loader), strict=True):
        train(x, y, real=real)
    with refused(UsageError, "padding", "tail='drop'", "weight=n"):
        train.step(*(array * 1 for array in batches[1]))
    if case.backend.devices == 1:
        rows = own_rows(case, 0)
        train(*rows, weight=int(rows[0].shape[0]))
    train.is_serial()


@check
def features_of_padded_batches(case: Case) -> None:
    """They are computed first, and trained on later, when no loader knows them."""
    train, loader = Recorded(case), loader_of(case, batches=1, tail="pad")
    with case.strategy.evaluate(train.model):
        features = [tuple(array * 1 for array in batch) for batch in loader]
    with refused(UsageError, "padding", "tail='drop'", "weight=n"):
        train.step(*features[0])
    if case.backend.devices == 1:
        train(*features[0], weight=int(features[0][0].shape[0]))
    with case.strategy.evaluate(train.model):
        case.strategy.gather([array for _, array in loader])
    train(*own_rows(case, 0))  # the results were asked for: an evaluation, and no features
    train.is_serial()


@check
def several_steps_of_each_batch_in_a_group(case: Case) -> None:
    """Read one by one, or from a list. Groups are counted; an incomplete one is not carried over into the next pass."""
    for read in (iter, list):
        train = Recorded(case, accumulate=2)
        for x, y in read(loader_of(case, batches=2)):
            for _ in range(2):
                train(x, y)
        train.is_serial()
    train, loader = Recorded(case, accumulate=4), loader_of(case, batches=2)
    for x, y in loader:
        for _ in range(2):
            train(x, y)
    first = next(iter(loader))
    with refused(StateError, "flush(model, optimizer)"):
        train.step(*first)
    assert case.strategy.flush(train.model, train.optimizer)
    train.is_serial([4, 2])

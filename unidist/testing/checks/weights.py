"""Promise 1 beside the straight road: what a batch weighs follows the batch, however the loop is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from unidist.errors import StateError, UnsupportedOperation, UsageError
from unidist.optim import SGD
from unidist.testing import reference
from unidist.testing.case import Case, check, close, refused
from unidist.testing.recorded import RATE, Recorded, by_generator, by_thread, loader_of, own_rows, real_rows

READING: tuple[Callable[[Iterable[Any]], Iterable[Any]], ...] = (iter, by_generator, by_thread, list)


@check
def reading_ahead(case: Case) -> None:
    """By a generator, by a thread, or all at once: the incomplete batch at the end keeps its weight."""
    for read in READING:
        for tail in ("keep", "pad"):
            train, loader = Recorded(case), loader_of(case, tail=tail)
            reals = real_rows(case, loader)
            for (x, y), real in zip(read(loader), reals, strict=True):
                train(x, y, real=real)
            train.is_serial()


@check
def reading_ahead_with_accumulation(case: Case) -> None:
    """The end of a pass closes its group where the last batch is used, not where it is read."""
    for read in READING:
        train = Recorded(case, accumulate=3)
        for x, y in read(loader_of(case, batches=4)):
            train(x, y)
        train.is_serial([3, 2])


@check
def list_of_batches_walked_twice(case: Case) -> None:
    """As PPO does: in order, then backwards."""
    train, batches = Recorded(case), list(loader_of(case))
    for x, y in batches + batches[::-1]:
        train(x, y)
    train.is_serial()


@check
def batches_that_were_changed(case: Case) -> None:
    """Augmented or cast: recognised by what was left as it was, or by their rows."""
    train = Recorded(case)
    for x, y in list(loader_of(case)):
        train(x * 2.0, y)
    for x, y in loader_of(case):
        train(x * 2.0, y * 1)
    train.is_serial()


@check
def two_loaders_zipped(case: Case) -> None:
    train = Recorded(case)
    for (a, b), (x, y) in zip(loader_of(case, batches=2), loader_of(case, batches=2, rest=2), strict=True):
        train(a, b)
        train(x, y)
    train.is_serial()


@check
def two_loaders_nested(case: Case) -> None:
    """Each pass of the inner one ends in the middle of the outer one's groups."""
    train = Recorded(case)
    for a, b in loader_of(case, batches=1):
        for x, y in loader_of(case, batches=1, rest=2):
            train(x, y)
        train(a, b)
    train.is_serial()


@check
def second_iterator_with_accumulation(case: Case) -> None:
    """Another pass over the same loader, which is only looked at, ends no group."""
    train, loader = Recorded(case, accumulate=2), loader_of(case, batches=3)
    batches = iter(loader)
    looked_at = list(loader)
    for x, y in batches:
        train(x, y)
    train.is_serial([2, 2])
    assert len(looked_at) == 4


@check
def one_batch_for_two_models(case: Case) -> None:
    first, second = Recorded(case), Recorded(case)
    for x, y in loader_of(case):
        first(x, y)
        second(x, y)
        second(x, y)
    first.is_serial()
    second.is_serial()


@check
def batches_left_out_and_reordered(case: Case) -> None:
    train, batches = Recorded(case), list(loader_of(case, batches=4))
    for number in (4, 0, 2):
        train(*batches[number])
    train.is_serial()


@check
def left_by_break_and_begun_again(case: Case) -> None:
    """With accumulation the group goes on where it was; each sample in it weighs the same."""
    train, loader = Recorded(case, accumulate=3), loader_of(case, batches=3)
    for number, (x, y) in enumerate(loader):
        if number == 2:
            break
        train(x, y)
    for x, y in loader:
        train(x, y)
    train.is_serial([3, 3])


@check
def position_counts_what_was_trained_on(case: Case) -> None:
    """Not what was read: a batch that waits for its step is the next one after a resume."""
    for read in READING:
        train, loader = Recorded(case), loader_of(case)
        seen, states = [], []
        for x, y in read(loader):
            train(x, y)
            seen.append(case.backend.to_numpy(x))
            states.append(loader.state())
        for number, state in enumerate(states[:-1]):
            resumed = loader_of(case)
            resumed.load_state(state)
            assert (case.backend.to_numpy(next(iter(resumed))[0]) == seen[number + 1]).all(), f"{read}, {number}"
        assert (states[-1]["epoch"], states[-1]["samples"]) == (1, 0)
    loader, changed = loader_of(case), Recorded(case)
    ahead = by_generator(loader)
    for _ in range(2):
        x, y = next(ahead)
        changed(x * 1.0, y * 1)
    with refused(StateError, "end of a pass"):
        loader.state()


@check
def data_of_ones_own(case: Case) -> None:
    """Local batches of different size that come from no loader; the losses are shares of the global mean."""
    train, losses = Recorded(case), []
    for step in range(4):
        losses.append(case.strategy.mean(train(*own_rows(case, step))))
    train.is_serial()
    if case.strategy.capabilities.synchronous is True:
        serial, everyone = reference.Serial(reference.weights(), SGD(RATE)), train.gather()
        together = [list(zip(*(rank[step] for rank in everyone), strict=True)) for step in range(4)]
        expected = [serial.step(np.concatenate(x), np.concatenate(y)) for x, y in together]
        close(losses, expected)


@check
def data_of_ones_own_with_accumulation(case: Case) -> None:
    train = Recorded(case, accumulate=2)
    for step in range(5):
        train(*own_rows(case, step))
    case.strategy.flush(train.model, train.optimizer)
    train.is_serial([2, 2, 1])


@check
def rows_that_were_filtered_out(case: Case) -> None:
    train = Recorded(case)
    for number, (x, y) in enumerate(loader_of(case, rest=2)):
        rows = (1 + (number + case.rank) % 3) * case.backend.devices
        train(x[:rows], y[:rows])
    train.is_serial()


@check
def batches_split_and_joined(case: Case) -> None:
    """Halves make a whole again with accumulate=2; two batches may make one step."""
    train = Recorded(case, accumulate=2)
    for x, y in loader_of(case, batches=2, rest=0 if case.size == 1 else 2):
        half = max(1, int(x.shape[0]) // 2 // case.backend.devices * case.backend.devices)
        train(x[:half], y[:half])
        train(x[half:], y[half:])
    train.is_serial()
    train, together = Recorded(case), list(loader_of(case, batches=3))
    for pair in (together[:2], together[2:]):
        joined = [np.concatenate([case.backend.to_numpy(array[part]) for array in pair]) for part in (0, 1)]
        train(*map(case.backend.from_numpy, joined))
    train.is_serial()


@check
def weight_that_is_told(case: Case) -> None:
    """`weight=` is what the loss is the mean of: tokens, say, of which the rows of this rank have more."""
    if case.backend.devices > 1:  # it does not say what each part of a batch weighs
        with refused(UnsupportedOperation, "devices"):
            Recorded(case)(*own_rows(case, 0), weight=8)
        return
    for accumulate in (1, 2):
        train = Recorded(case, accumulate=accumulate)
        for step in range(4):
            x, y = own_rows(case, step)
            times = 1 + (case.rank + step) % 2
            train(x, y, times=times, weight=times * int(x.shape[0]))
        train.is_serial()
    for wrong in (-1, "many", float("nan")):
        with refused(UsageError, "weight"):
            train.step(*own_rows(case, 0), weight=wrong)


@check
def loss_that_is_a_sum(case: Case) -> None:
    """`reduction="sum"`: the gradient is that of the sum over all ranks and micro-batches."""
    whole = 4 * case.backend.devices * case.size
    for accumulate in (1, 2):
        model, optimizer = case.strategy.prepare(case.mlp(), SGD(RATE / whole / accumulate), accumulate=accumulate)
        step = case.strategy.train_step(
            model, optimizer, lambda m, x, y: case.zoo.cross_entropy(m, x, y) * float(x.shape[0]), reduction="sum"
        )
        x, y = reference.data(whole * 2)
        for a, b in case.strategy.loader((x, y), per_device_batch=4):
            step(a, b)
        serial = reference.Serial(reference.weights(), SGD(RATE))
        for first in range(0, 2 * whole, whole * accumulate):
            serial.step(x[first : first + whole * accumulate], y[first : first + whole * accumulate])
        if case.strategy.capabilities.lockstep is True:
            case.close_to_serial(model, serial)


@check
def sums_and_means_in_one_group_are_refused(case: Case) -> None:
    """No factor of the update fits both. The group stays as it was."""
    train = Recorded(case, accumulate=2)
    summed = case.strategy.train_step(train.model, train.optimizer, case.zoo.cross_entropy, reduction="sum")
    train(*own_rows(case, 0))
    with refused(UsageError, "'sum'", "flush("):
        summed(*own_rows(case, 0))
    train(*own_rows(case, 1))
    train.is_serial()
    summed(*own_rows(case, 0))
    with refused(UsageError, "'mean'", "flush("):
        train.step(*own_rows(case, 0))
    if case.strategy.capabilities.spelled_out is True:
        with case.strategy.forward(train.model):
            loss = case.zoo.cross_entropy(train.model, *own_rows(case, 0))
        with refused(UsageError, "'mean'", "flush("):
            case.strategy.backward(loss)


@check
def end_of_a_pass_that_cannot_be_seen_is_refused(case: Case) -> None:
    """An incomplete group whose last batch was changed: `flush` makes its update."""
    train, loader = Recorded(case, accumulate=3), loader_of(case, batches=3, rest=0, tail="drop")
    for _ in range(2):
        for x, y in loader:
            train(x * 1.0, y * 1)
    train.is_serial()
    train, loader = Recorded(case, accumulate=2), loader_of(case, batches=3, rest=0, tail="drop")
    for epoch in range(2):
        for n, (x, y) in enumerate(loader):
            if (epoch, n) == (1, 0):
                del x, y
                break
            train(x * 1.0, y * 1)
            del x, y
    with refused(StateError, "flush"):
        train.step(*own_rows(case, 0))


@check
def spelled_out_steps_weigh_their_batches(case: Case) -> None:
    """Seen through the call of the model; or told."""
    case.requires("spelled_out")
    for told in (False, True):
        train = Recorded(case)
        batches = [*by_generator(loader_of(case)), *(own_rows(case, step) for step in range(3))]
        for x, y in batches:
            train.remember(x, y)
            with case.strategy.forward(train.model):
                loss = case.zoo.cross_entropy(train.model, x, y)
            case.strategy.backward(loss, weight=int(x.shape[0]) if told else None)
            case.strategy.step(train.optimizer)
        train.is_serial()
    if case.size > 1 and case.strategy.capabilities.lockstep is True:
        other = case.mlp()  # stands for a loss that goes through a part of the model
        with case.strategy.forward(train.model):
            loss = case.zoo.cross_entropy(other, *own_rows(case, 0))
        with refused(UsageError, "weight="):
            case.strategy.backward(loss)


@check
def gather_belongs_to_its_loader(case: Case) -> None:
    first = case.strategy.loader(np.arange(13), per_device_batch=2, shuffle=True, seed=1)
    second = case.strategy.loader(np.arange(13) + 100, per_device_batch=2, shuffle=True, seed=2)
    one, two = map(list, zip(*zip(first, second, strict=True), strict=True))
    with refused(UsageError, "loader"):
        case.strategy.gather(one)
    assert case.strategy.gather(one, first).tolist() == list(range(13))
    assert case.strategy.gather(two, second).tolist() == list(range(100, 113))

"""Calls of the framework that an old loop left in place: the step is still exact, or it is refused."""

from __future__ import annotations

import numpy as np

from unidist.errors import StateError, UsageError
from unidist.optim import SGD
from unidist.testing import reference
from unidist.testing.case import Case, DoesNotApply, check, refused
from unidist.testing.checks.beside import batch
from unidist.testing.recorded import RATE, Recorded, own_rows


@check
def native_backward_left_in_the_loop(case: Case) -> None:
    """Its gradients belong to no step: before a group, or in the middle of it."""
    for accumulate, left_after in ((1, (0, 1)), (2, (0, 2)), (2, (1, 3))):
        train = Recorded(case, accumulate=accumulate)
        try:
            for step in range(2 * accumulate):
                if step in left_after:
                    case.zoo.native_backward(train.model, *batch(case))
                train(*own_rows(case, step))
        except StateError:
            continue
        train.is_serial()


@check
def gradients_changed_before_the_update(case: Case) -> None:
    """By the loop's own clipping, say: that works on what will be applied, or is refused."""
    case.requires("spelled_out")
    for even in (True, False):
        train, expected = Recorded(case), reference.Serial(reference.weights(), SGD(RATE / 2))
        x, y = batch(case) if even else own_rows(case, 0)
        train.remember(x, y)
        with case.strategy.forward(train.model):
            loss = case.zoo.cross_entropy(train.model, x, y)
        case.strategy.backward(loss)
        case.zoo.halve_gradients(train.model)
        try:
            case.strategy.step(train.optimizer)
        except StateError:
            continue
        everyone = [rows for (rows,) in train.gather()]
        expected.step(np.concatenate([x for x, _ in everyone]), np.concatenate([y for _, y in everyone]))
        case.close_to_serial(train.model, expected)


@check
def gradients_cleared_before_the_update(case: Case) -> None:
    """Between backward and step there is nothing to clear."""
    case.requires("spelled_out")
    train = Recorded(case)
    for step in range(2):
        x, y = own_rows(case, step)
        train.remember(x, y)
        with case.strategy.forward(train.model):
            loss = case.zoo.cross_entropy(train.model, x, y)
        case.strategy.backward(loss)
        try:
            case.zoo.clear_gradients(train.model, train.optimizer)
            case.strategy.step(train.optimizer)
        except StateError:
            return
    train.is_serial()


@check
def batches_that_differ_in_another_axis(case: Case) -> None:
    """Data of one's own whose samples are not in the first axis: the weight has to be said."""
    case.requires("lockstep")
    case.needs_ranks(2)
    model, optimizer = case.strategy.prepare(case.mlp(), SGD(RATE))

    def loss(m: object, x: object, y: object) -> object:
        return case.zoo.cross_entropy(m, x.reshape((-1, reference.SIZES[0])), y.reshape((-1,)))  # type: ignore[attr-defined]

    step = case.strategy.train_step(model, optimizer, loss)
    x, y = (case.backend.to_numpy(row)[: 2 + case.rank] for row in own_rows(case, 1))
    transposed = [case.backend.from_numpy(np.stack([array, array])) for array in (x, y)]
    with refused(UsageError, "weight="):
        step(*transposed)


@check
def batches_that_come_to_differ_in_another_axis(case: Case) -> None:
    """The same after steps in which they did not; a shape that changes on all ranks alike is fine."""
    case.requires("lockstep")
    case.needs_ranks(2)
    model, optimizer = case.strategy.prepare(case.mlp(), SGD(RATE))
    step = case.strategy.train_step(
        model,
        optimizer,
        lambda m, x, y: case.zoo.cross_entropy(m, x.reshape((-1, reference.SIZES[0])), y.reshape((-1,))),
    )

    def repeated(rows: int) -> list[object]:
        x, y = (case.backend.to_numpy(array) for array in batch(case))
        return [case.backend.from_numpy(np.stack([array[:rows]] * 2 * case.backend.devices)) for array in (x, y)]

    for rows in (3, 3, 2, 3):
        step(*repeated(rows))
    with refused(UsageError, "weight="):
        step(*repeated(4 if case.rank == 0 else 1))


@check
def rows_taken_of_some_arrays_only(case: Case) -> None:
    """The batch is recognised by the array that was left as it was, and yet its loss is the mean of fewer rows."""
    x, y = reference.data(8 * case.backend.devices * case.size)
    data = (x, y, np.arange(len(y)))
    model, optimizer = case.strategy.prepare(case.mlp(), SGD(RATE))
    step = case.strategy.train_step(model, optimizer, lambda m, x, y, i: case.zoo.cross_entropy(m, x, y))
    rows = 2 * case.backend.devices
    for a, b, i in case.strategy.loader(data, per_device_batch=4):
        with refused(UsageError, "weight=n"):
            step(a[:rows], b[:rows], i)
        step(a * 1.0, b, i)


@check
def parameters_given_to_the_optimizer_after_prepare(case: Case) -> None:
    """By add_param_group. Those of the model are trained; of others, nobody would exchange the gradients."""
    case.requires("native_optimizer")
    net, strategy = case.mlp(), case.strategy
    native = case.zoo.native_sgd(net, RATE)
    if not hasattr(native, "add_param_group"):
        raise DoesNotApply(f"a {type(native).__name__} has no add_param_group")
    first, *others = net.parameters()
    model, optimizer = strategy.prepare(net, type(native)([first], lr=RATE), accumulate=2)
    optimizer.add_param_group({"params": others})
    step = strategy.train_step(model, optimizer, case.zoo.cross_entropy)
    x, y = reference.data(8 * case.backend.devices * case.size)
    loader = strategy.loader((x, y), per_device_batch=4)
    for a, b in loader:
        step(a, b)
    serial = reference.Serial(reference.weights(), SGD(RATE))
    serial.step(x, y)
    case.close_to_serial(model, serial)

    strangers, said = list(case.mlp().parameters()), "must be a parameter of the model"
    step(*batch(case))
    if strategy.capabilities.spelled_out is True:
        with strategy.forward(model):
            loss = case.zoo.cross_entropy(model, *batch(case))
        strategy.backward(loss)
        optimizer.add_param_group({"params": strangers})
        with refused(UsageError, said):
            strategy.step(optimizer)
    else:
        optimizer.add_param_group({"params": strangers})
        with refused(UsageError, said):
            strategy.flush(model, optimizer)
    with refused(UsageError, said):
        step(*batch(case))
    case.close_to_serial(model, serial)


@check
def groups_of_two_models_that_alternate(case: Case) -> None:
    """The loss of the second runs through the first, which is in the middle of a group: that is not its gradient."""
    first, second = Recorded(case, accumulate=2), Recorded(case, accumulate=2)

    def loss(m: object, x: object, y: object) -> object:
        return case.zoo.cross_entropy(m, x, y) + case.zoo.cross_entropy(first.model, x, y) * 0.5

    through = case.strategy.train_step(second.model, second.optimizer, loss)
    for step in range(4):
        x, y = batch(case, step)
        first(x, y)
        second.remember(x, y)
        through(x, y)
    first.is_serial()
    second.is_serial()

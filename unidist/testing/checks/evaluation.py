"""Evaluation counts every sample exactly once, and leaves no trace in the model."""

from __future__ import annotations

import contextlib

import numpy as np

from unidist.errors import UnsupportedOperation, UsageError
from unidist.optim import SGD
from unidist.testing import reference
from unidist.testing.case import Case, check, close, refused


@check
def gather_is_in_data_set_order(case: Case) -> None:
    """Data that does not divide, shuffled or not, a rank without samples included."""
    for samples in (1, case.size + 1, 23, 24):
        for shuffle in (False, True):
            for tail in ("keep", "pad"):
                loader = case.strategy.loader(
                    np.arange(samples), per_device_batch=2, shuffle=shuffle, seed=4, tail=tail
                )
                got = case.strategy.gather([x for x in loader])
                assert got.tolist() == list(range(samples)), f"{samples} samples, shuffle={shuffle}, tail={tail}"


@check
def gather_of_the_last_batch(case: Case) -> None:
    """Inside the loop: the samples of this global batch, each once."""
    loader = case.strategy.loader(np.arange(23), per_device_batch=2)
    assert [n for x in loader for n in case.strategy.gather(x).tolist()] == list(range(23))


@check
def gather_keeps_rows_and_dtypes(case: Case) -> None:
    x, y = reference.data(11)
    loader = case.strategy.loader((x, y), per_device_batch=2)
    got = case.strategy.gather([case.backend.to_numpy(a) for a, _ in loader])
    assert got.dtype == np.float32
    assert (got == x).all()
    hits = case.strategy.gather([case.backend.to_numpy(b) == 1 for _, b in loader])
    assert hits.dtype == np.bool_
    assert (hits == (y == 1)).all()


@check
def gather_of_something_else_is_refused(case: Case) -> None:
    loader = case.strategy.loader(np.arange(8), per_device_batch=2)
    batches = [x for x in loader]
    with refused(UsageError, "batches"):
        case.strategy.gather(batches[:-1] if len(batches) > 1 else [], loader)
    with refused(UsageError, "row"):
        case.strategy.gather([np.float32(1.0) for _ in batches], loader)


@check
def evaluation_of_a_model(case: Case) -> None:
    """The logits of every sample, from all ranks, are the serial ones, also with fewer samples than ranks."""
    model = case.strategy.prepare(case.mlp(), SGD(0.1))[0]
    serial = reference.Serial(reference.weights(), SGD(0.1))
    for samples in (1, 13):
        x, y = reference.data(samples)
        with case.strategy.evaluate(model):
            got = case.strategy.gather([model(a) for a, _ in case.strategy.loader((x, y), per_device_batch=3)])
        close([got], [serial.logits(x)])


@check
def evaluation_does_not_disturb_training(case: Case) -> None:
    """In the middle of an epoch, of an accumulation group, and with a loader of its own."""
    samples = 4 * case.backend.devices * case.size * 3 + 1
    model, optimizer = case.strategy.prepare(case.mlp(), SGD(0.5), accumulate=2)
    step = case.strategy.train_step(model, optimizer, case.zoo.cross_entropy)
    for x, y in case.strategy.loader(reference.data(samples), per_device_batch=4, shuffle=True, seed=3):
        with case.strategy.evaluate(model):
            case.strategy.gather([model(a) for a in case.strategy.loader(reference.data(5)[0], per_device_batch=1)])
        step(x, y)
    serial, _ = case.train_serially(SGD(0.5), samples, epochs=1, accumulate=2)
    case.close_to_serial(model, serial)


@check
def evaluation_is_the_same_on_every_rank(case: Case) -> None:
    """Running statistics differ between ranks after a step; evaluation must not show it, nor change them."""
    model, optimizer = case.strategy.prepare(case.zoo.with_buffers(), SGD(0.1))
    step = case.strategy.train_step(model, optimizer, case.zoo.cross_entropy)
    for x, y in case.strategy.loader(reference.data(8 * case.size), per_device_batch=4 * 1):
        step(x, y)
    probe = case.backend.from_numpy(reference.data(5)[0])
    with case.strategy.evaluate(model):
        outputs = case.backend.to_numpy(model(probe))
        again = case.backend.to_numpy(model(probe))
    assert (outputs == again).all(), "evaluation changed the model"
    for theirs in case.strategy.all_gather(outputs):
        assert (theirs == outputs).all(), "ranks evaluate differently"


@check
def prediction_is_in_order(case: Case) -> None:
    """`predict` on data that does not divide, fewer samples than ranks included."""
    model = case.strategy.prepare(case.mlp())
    serial = reference.Serial(reference.weights(), SGD(0.1))
    for samples in (1, 2, 13):
        x, y = reference.data(samples)
        loader = case.strategy.loader((x, y), per_device_batch=3, shuffle=True)
        close([case.strategy.predict(model, loader)], [serial.logits(x)])
        doubled = case.strategy.predict(model, loader, lambda m, batch: m(batch[0]) * 2)
        close([doubled], [serial.logits(x) * 2], tolerance=4e-6)


@check
def evaluation_within_evaluation(case: Case) -> None:
    model = case.strategy.prepare(case.mlp(), SGD(0.1))[0]
    x, _ = reference.data(7)
    serial = reference.Serial(reference.weights(), SGD(0.1))
    with case.strategy.evaluate(model):
        inner = case.strategy.predict(model, case.strategy.loader(x, per_device_batch=3))
        outer = case.strategy.gather([model(a) for a in case.strategy.loader(x, per_device_batch=3)])
    close([inner, outer], [serial.logits(x)] * 2)


@check
def stream_has_no_order_to_gather_in(case: Case) -> None:
    case.requires("native_loader")
    loader = case.strategy.loader((np.float32(n) for n in range(12 * case.size)), per_device_batch=2)
    batches = [x for x in loader]
    with refused(UnsupportedOperation, "stream"):
        case.strategy.gather(batches)


@check
def mean_of_an_evaluation_counts_samples(case: Case) -> None:
    """Not batches, and no padding: one number for each batch, or one for each row."""
    model = case.strategy.prepare(case.mlp(), SGD(0.5))[0]
    serial = reference.Serial(reference.weights(), SGD(0.5))
    for samples in (1, 4 * case.size + 1, 11):
        x, y = reference.data(samples)
        expected, _ = serial.loss_and_gradients(x, y)
        for tail in ("keep", "pad"):
            loader = case.strategy.loader((x, y), per_device_batch=4 if tail == "keep" else 3, tail=tail)
            with case.strategy.evaluate(model):
                rows = [case.zoo.per_sample_loss(model, a, b) for a, b in loader]
                inside = case.strategy.mean(rows, loader)
            close([inside, case.strategy.mean(rows, loader)], [expected] * 2)
        loader = case.strategy.loader((x, y), per_device_batch=4)
        with case.strategy.evaluate(model):
            losses = [case.zoo.cross_entropy(model, a, b) for a, b in loader]
            inside = case.strategy.mean(losses, loader)
        close([inside, case.strategy.mean(losses, loader)], [expected] * 2)


@check
def mean_of_numbers_that_may_be_results_is_refused(case: Case) -> None:
    """Whether they are to count by samples cannot be seen in them. The losses of a training step are recognised."""
    model, optimizer = case.strategy.prepare(case.mlp(), SGD(0.0))
    step = case.strategy.train_step(model, optimizer, case.zoo.cross_entropy)
    whole = 4 * case.backend.devices * case.size
    train = case.strategy.loader(reference.data(2 * whole + 1), per_device_batch=4)
    test = case.strategy.loader(reference.data(2 * whole + 1), per_device_batch=4)
    even = case.strategy.loader(reference.data(3 * whole), per_device_batch=4)
    losses = [step(x, y) for x, y in train]
    expected = case.strategy.mean(losses)
    with case.strategy.evaluate(model):
        assert case.strategy.mean([float(n) for n, _ in enumerate(even)]) == 1.0, (
            "which of the two is meant is the same"
        )
        numbers = [float(n) for n, _ in enumerate(test)]
        with refused(UsageError, "mean(values, loader)"):
            case.strategy.mean(numbers)
        assert case.strategy.mean(losses) == expected
    with refused(UsageError, "mean(values, loader)"):  # and so it is afterwards
        case.strategy.mean(numbers)
    assert case.strategy.mean(losses) == expected
    assert case.strategy.mean([1.0, 2.0]) == 1.5
    for wrong in (losses, losses[0]):
        with refused(UsageError, "mean"):
            case.strategy.mean(wrong, train)
    if case.strategy.capabilities.spelled_out is True:
        for x, y in train:
            with case.strategy.forward(model):
                loss = case.zoo.cross_entropy(model, x, y)
            case.strategy.backward(loss)
            case.strategy.step(optimizer)
            numbers.append(float(case.backend.to_numpy(loss).item()))
        with refused(UsageError, "mean(values, loader)"):
            case.strategy.mean(numbers[3:])
        if case.strategy.capabilities.lockstep is True:
            serial, _ = reference.Serial(reference.weights(), SGD(0.0)).loss_and_gradients(
                *reference.data(2 * whole + 1)
            )
            close([case.strategy.mean(numbers[3:], train)], [serial])


@check
def gather_of_a_pass_before_the_last_is_refused(case: Case) -> None:
    """Each pass over a shuffled loader has its own order. One that is gathered before the next is no matter."""
    model = case.strategy.prepare(case.mlp())
    for shuffle in (False, True):
        data = (reference.data(13)[0], np.arange(13))
        loader = case.strategy.loader(data, per_device_batch=2, shuffle=shuffle, seed=1)
        next(iter(loader))  # a look at the data is no pass that results could be of
        for inside in (False, True):
            with case.strategy.evaluate(model) if inside else contextlib.nullcontext():
                first = [n for _, n in loader]
                assert case.strategy.gather(first, loader).tolist() == list(range(13))
                first = [n for _, n in loader]
                second = [n for _, n in loader]
                for whose in ((), (loader,)):
                    if shuffle:
                        with refused(UsageError, "shuffle=False"):
                            case.strategy.gather(first, *whose)
                    else:
                        assert case.strategy.gather(second, *whose).tolist() == list(range(13))
            with case.strategy.evaluate(model):  # results from here on belong to the passes made here
                assert case.strategy.gather([n for _, n in loader]).tolist() == list(range(13))


@check
def mean_of_several_numbers_for_each_row(case: Case) -> None:
    """Flattened, those of padding cannot be told from the others any more."""
    samples = 4 * case.backend.devices * case.size + 1
    rows = np.arange(samples, dtype=np.float32)[:, None].repeat(3, axis=1)
    for tail in ("keep", "pad"):
        loader = case.strategy.loader(rows, per_device_batch=4, tail=tail)
        results = [case.backend.to_numpy(batch) for batch in loader]
        close([case.strategy.mean(results, loader)], [rows.mean()])
        flat = [result.reshape(-1) for result in results]
        if tail == "pad":
            with refused(UsageError, "reshape"):
                case.strategy.mean(flat, loader)
    loader = case.strategy.loader(rows[: 2 * case.size], per_device_batch=2)
    close(
        [case.strategy.mean([case.backend.to_numpy(batch).reshape(-1) for batch in loader], loader)],
        [rows[: 2 * case.size].mean()],
    )

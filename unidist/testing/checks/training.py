"""Promises 1, 4 and 5: the same start, the mean gradient, accumulation, and the optimizers' arithmetic."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import numpy as np

from unidist.errors import RanksDisagree, StateError, UsageError
from unidist.optim import SGD, Adam, AdamW, OptimizerSpec
from unidist.testing import reference
from unidist.testing.case import Case, check, close, refused


def same_as_serial(case: Case, spec: OptimizerSpec, samples: int, **how: Any) -> None:
    if how.get("clip_norm"):
        case.requires("clip_norm")
    model, losses = case.train(spec, samples, **how)
    serial, expected = case.train_serially(spec, samples, **how)
    case.close_to_serial(model, serial)
    if how.get("accumulate", 1) == 1 and case.strategy.capabilities.synchronous is True:
        close(losses, expected)


@check
def same_start(case: Case) -> None:
    """Ranks that began differently get rank 0's values, and are told."""
    with contextlib.redirect_stderr(io.StringIO()) as heard:
        model = case.strategy.prepare(case.mlp(seed=1 + case.rank))
    close(case.parameters(model), reference.weights(1), tolerance=0)
    assert ("began with other values" in heard.getvalue()) == (case.rank == 0 and case.size > 1)
    with contextlib.redirect_stderr(io.StringIO()) as heard:
        case.strategy.prepare(case.mlp())
    assert heard.getvalue() == ""


@check
def same_start_of_buffers(case: Case) -> None:
    model = case.zoo.with_buffers()
    state = {name: np.full(tensor.shape, case.rank + 1.0) for name, tensor in case.backend.state(model).items()}
    case.backend.load_state(model, state)
    with contextlib.redirect_stderr(io.StringIO()):
        model = case.strategy.prepare(model, SGD(0.1))[0]
    close(case.parameters(model), [np.full(array.shape, 1.0) for array in state.values()], tolerance=0)


@check
def different_models_are_reported(case: Case) -> None:
    case.needs_ranks(2)
    with refused(RanksDisagree, "different models", "rank"):
        case.strategy.prepare(case.mlp() if case.rank == 0 else case.zoo.with_buffers())


@check
def different_settings_are_reported(case: Case) -> None:
    case.needs_ranks(2)
    with refused(RanksDisagree, "train them differently", "rank"):
        case.strategy.prepare(case.mlp(), SGD(0.1 * (1 + case.rank)))
    if case.strategy.capabilities.native_optimizer is True:
        model = case.mlp()
        with refused(RanksDisagree, "train them differently", "rank"):
            case.strategy.prepare(model, case.zoo.native_sgd(model, 0.1 * (1 + case.rank)))


@check
def mean_gradient(case: Case) -> None:
    """Local batches of one size: a step is the serial step on their concatenation."""
    same_as_serial(case, SGD(0.5), samples=4 * case.backend.devices * case.size * 3)


@check
def mean_gradient_with_an_uneven_tail(case: Case) -> None:
    """The last local batches differ in size; weights by sample count."""
    same_as_serial(case, SGD(0.5), samples=4 * case.backend.devices * case.size * 2 + case.size * 2 - 1)


@check
def mean_gradient_with_a_rank_without_samples(case: Case) -> None:
    """The tail is one sample: every other rank takes part with padding that weighs nothing."""
    same_as_serial(case, SGD(0.5), samples=4 * case.backend.devices * case.size * 2 + 1)


@check
def mean_gradient_with_a_padded_tail(case: Case) -> None:
    same_as_serial(case, SGD(0.5), samples=4 * case.backend.devices * case.size * 2 + 3, tail="pad")


@check
def mean_gradient_with_a_dropped_tail(case: Case) -> None:
    same_as_serial(case, SGD(0.5), samples=4 * case.backend.devices * case.size * 2 + 3, tail="drop")


@check
def accumulation_equals_the_big_batch(case: Case) -> None:
    same_as_serial(case, SGD(0.5, momentum=0.9), samples=4 * case.backend.devices * case.size * 6, accumulate=3)


@check
def accumulation_ends_with_the_pass(case: Case) -> None:
    """The last group is incomplete and its last batch uneven: it still weighs every sample the same."""
    whole = 4 * case.backend.devices * case.size
    same_as_serial(case, SGD(0.5, momentum=0.9), samples=whole * 4 + case.size * 2 + 1, accumulate=3)


@check
def clipping_by_global_norm(case: Case) -> None:
    same_as_serial(case, SGD(0.5), samples=4 * case.backend.devices * case.size * 2 + 1, clip_norm=0.05)


@check
def clipping_leaves_small_gradients_alone(case: Case) -> None:
    same_as_serial(case, SGD(0.5), samples=4 * case.backend.devices * case.size * 2, clip_norm=1e6)


@check
def sgd_with_momentum_and_decay(case: Case) -> None:
    same_as_serial(case, SGD(0.2, momentum=0.9, weight_decay=0.01), samples=40)


@check
def sgd_with_nesterov(case: Case) -> None:
    same_as_serial(case, SGD(0.2, momentum=0.9, weight_decay=0.1, nesterov=True), samples=40)


@check
def momentum_under_a_schedule(case: Case) -> None:
    """The rate must stay outside the velocity."""
    same_as_serial(case, SGD(lambda step: 0.5 / (1 + step), momentum=0.9), samples=40)


@check
def adam(case: Case) -> None:
    same_as_serial(case, Adam(0.01, weight_decay=0.01), samples=40)


@check
def adam_with_a_large_epsilon(case: Case) -> None:
    """Tells whether epsilon stands outside the bias correction."""
    same_as_serial(case, Adam(0.01, eps=1e-2), samples=40)


@check
def adamw(case: Case) -> None:
    same_as_serial(case, AdamW(0.01, weight_decay=0.1), samples=40)


@check
def adamw_under_a_schedule(case: Case) -> None:
    same_as_serial(case, AdamW(lambda step: 0.02 * 0.9**step), samples=40)


@check
def native_optimizer(case: Case) -> None:
    case.requires("native_optimizer")
    model = case.mlp()
    model, optimizer = case.strategy.prepare(model, case.zoo.native_sgd(model, 0.5))
    step = case.strategy.train_step(model, optimizer, case.zoo.cross_entropy)
    for x, y in case.strategy.loader(reference.data(40), per_device_batch=4, shuffle=True, seed=3):
        step(x, y)
    case.close_to_serial(model, case.train_serially(SGD(0.5), 40, epochs=1)[0])


@check
def optimizer_of_another_model_is_refused(case: Case) -> None:
    with refused(UsageError, "parameters"):
        case.strategy.prepare(case.mlp(), case.zoo.native_sgd(case.mlp(), 0.5))


@check
def spelled_out_step(case: Case) -> None:
    """forward, backward, step give what train_step gives, with accumulation, clipping and an uneven tail."""
    case.requires("spelled_out")
    clip_norm = 0.1 if case.strategy.capabilities.clip_norm is True else None
    samples = 4 * case.backend.devices * case.size * 4 + case.size * 2 + 1  # five batches, the last one uneven
    model, optimizer = case.strategy.prepare(case.mlp(), SGD(0.5, momentum=0.9), accumulate=2)
    updates = []
    for x, y in case.strategy.loader(reference.data(samples), per_device_batch=4, shuffle=True, seed=3):
        with case.strategy.forward(model):
            loss = case.zoo.cross_entropy(model, x, y)
        case.strategy.backward(loss)
        updates.append(case.strategy.step(optimizer, clip_norm=clip_norm))
    assert updates == [False, True, False, True, True]
    serial, _ = case.train_serially(SGD(0.5, momentum=0.9), samples, epochs=1, accumulate=2, clip_norm=clip_norm)
    case.close_to_serial(model, serial)


@check
def spelled_out_step_in_the_wrong_order_is_refused(case: Case) -> None:
    case.requires("spelled_out")
    model, optimizer = case.strategy.prepare(case.mlp(), SGD(0.5))
    x, y = (case.backend.from_numpy(array) for array in reference.data(4))
    with refused(StateError, "forward"):
        case.strategy.backward(case.zoo.cross_entropy(model, x, y))
    with refused(StateError, "backward"):
        case.strategy.step(optimizer)


@check
def loss_that_is_not_one_number_is_refused(case: Case) -> None:
    model, optimizer = case.strategy.prepare(case.mlp(), SGD(0.5))
    step = case.strategy.train_step(model, optimizer, case.zoo.per_sample_loss)
    x, y = (case.backend.from_numpy(array) for array in reference.data(4 * case.backend.devices))
    with refused(UsageError, "mean"):
        step(x, y)
    close(case.parameters(model), reference.weights(), tolerance=0)


@check
def two_models_that_train_each_other(case: Case) -> None:
    """As in a GAN: the loss of one runs through the other, whose own step must not feel it."""
    case.requires("spelled_out")
    whole = 4 * case.backend.devices * case.size
    first, first_optimizer = case.strategy.prepare(case.mlp(), SGD(0.5))
    second, second_optimizer = case.strategy.prepare(case.mlp(seed=2), SGD(0.5))
    for x, y in case.strategy.loader(reference.data(whole * 2), per_device_batch=4):
        with case.strategy.forward(second):
            loss = case.zoo.cross_entropy(first, x, y) + case.zoo.cross_entropy(second, x, y)
        case.strategy.backward(loss)
        case.strategy.step(second_optimizer)
        with case.strategy.forward(first):
            loss = case.zoo.cross_entropy(first, x, y)
        case.strategy.backward(loss)
        case.strategy.step(first_optimizer)
    x, y = reference.data(whole * 2)
    for seed, model in ((1, first), (2, second)):
        serial = reference.Serial(reference.weights(seed), SGD(0.5))
        for begin in (0, whole):
            serial.step(x[begin : begin + whole], y[begin : begin + whole])
        case.close_to_serial(model, serial)


@check
def weights_belong_to_the_batch(case: Case) -> None:
    """Also when the pass is over before its batches are used, or when another pass was made meanwhile."""
    samples = 4 * case.backend.devices * case.size * 2 + 1
    expected = case.train_serially(SGD(0.5), samples, epochs=1)[0]

    def trained(batches: Any) -> Any:
        model, optimizer = case.strategy.prepare(case.mlp(), SGD(0.5))
        step = case.strategy.train_step(model, optimizer, case.zoo.cross_entropy)
        for x, y in batches:
            for _ in case.strategy.loader(np.arange(case.size), per_device_batch=1):
                pass
            step(x, y)
        return model

    def loader() -> Any:
        return case.strategy.loader(reference.data(samples), per_device_batch=4, shuffle=True, seed=3)

    case.close_to_serial(trained(loader()), expected)
    case.close_to_serial(trained(list(loader())), expected)


@check
def unfinished_group_can_be_flushed(case: Case) -> None:
    """After `break`: an update of what was accumulated, each sample weighing the same."""
    case.requires("accumulate")
    whole = 4 * case.backend.devices * case.size
    model, optimizer = case.strategy.prepare(case.mlp(), SGD(0.5), accumulate=3)
    step = case.strategy.train_step(model, optimizer, case.zoo.cross_entropy)
    for number, (x, y) in enumerate(case.strategy.loader(reference.data(whole * 6), per_device_batch=4), 1):
        step(x, y)
        if number == 5:
            break
    assert case.strategy.flush(model, optimizer) is True
    assert case.strategy.flush(model, optimizer) is False
    x, y = reference.data(whole * 6)
    serial = reference.Serial(reference.weights(), SGD(0.5))
    serial.step(x[: 3 * whole], y[: 3 * whole])
    serial.step(x[3 * whole : 5 * whole], y[3 * whole : 5 * whole])
    case.close_to_serial(model, serial)


@check
def all_ranks_stay_equal(case: Case) -> None:
    """To the last bit, after training. Without lockstep, evaluation_is_the_same_on_every_rank is what can be had."""
    case.requires("lockstep")
    model, _ = case.train(Adam(0.01), samples=43, epochs=3)
    for everywhere in case.strategy.all_gather({"p": case.parameters(model)}):
        close(everywhere["p"], case.parameters(model), tolerance=0)


@check
def error_in_a_step_loses_its_group_only(case: Case) -> None:
    """Training goes on after an error that the user catches, as if the group that it was in had never begun."""
    case.requires("accumulate", "lockstep", "spelled_out")  # a compiled step does not come back to the user's code
    whole = 4 * case.backend.devices * case.size
    fails = [False, False, False, True, False, False]

    def loss_fn(model: Any, x: Any, y: Any) -> Any:
        if case.backend.devices == 1 and fails.pop(0):
            raise KeyError("a bad sample")
        return case.zoo.cross_entropy(model, x, y)

    spec = SGD(lambda update: 0.5 / (1 + update), momentum=0.9)
    model, optimizer = case.strategy.prepare(case.mlp(), spec, accumulate=2)
    step = case.strategy.train_step(model, optimizer, loss_fn)
    for x, y in case.strategy.loader(reference.data(whole * 6), per_device_batch=4):
        with contextlib.suppress(KeyError):
            step(x, y)
    x, y = reference.data(whole * 6)
    serial = reference.Serial(reference.weights(), spec)
    for begin in (0, 4) if case.backend.devices == 1 else (0, 2, 4):
        serial.step(x[begin * whole : (begin + 2) * whole], y[begin * whole : (begin + 2) * whole])
    case.close_to_serial(model, serial)

"""Loops that go past the step: ranks must not drift apart without a word."""

from __future__ import annotations

import numpy as np

from unidist.errors import RanksDisagree, StateError
from unidist.optim import SGD
from unidist.testing import reference
from unidist.testing.case import Case, DoesNotApply, check, refused
from unidist.testing.recorded import Recorded, loader_of


def batch(case: Case, seed: int = 0) -> tuple[object, object]:
    x, y = reference.data(4 * case.backend.devices, seed=7 + seed + case.rank)
    return case.backend.from_numpy(x), case.backend.from_numpy(y)


@check
def loss_through_the_users_own_model(case: Case) -> None:
    """A closure over what was given to prepare, or `unwrap`: the same step."""
    whole = 4 * case.backend.devices * case.size
    x, y = reference.data(whole * 2)
    serial = reference.Serial(reference.weights(), SGD(0.5))
    for first in (0, whole):
        serial.step(x[first : first + whole], y[first : first + whole])
    for how in ("closure", "unwrap"):
        net = case.mlp()
        model, optimizer = case.strategy.prepare(net, SGD(0.5))
        inner = net if how == "closure" else case.strategy.unwrap(model)
        step = case.strategy.train_step(
            model, optimizer, lambda m, a, b, inner=inner: case.zoo.cross_entropy(inner, a, b)
        )
        for a, b in case.strategy.loader((x, y), per_device_batch=4):
            step(a, b)
        case.close_to_serial(model, serial)


@check
def parameter_unfrozen_after_prepare(case: Case) -> None:
    """Trained exactly, or refused."""
    net = case.mlp()
    case.zoo.set_trained(net, False)
    model, optimizer = case.strategy.prepare(net, case.zoo.native_sgd(net, 0.5))
    step = case.strategy.train_step(model, optimizer, case.zoo.cross_entropy)
    step(*batch(case))
    case.zoo.set_trained(model, True)
    try:
        step(*batch(case, 1))
    except StateError:  # on every rank alike
        return
    for everywhere in case.strategy.all_gather({"p": case.parameters(model)}):
        assert all((a == b).all() for a, b in zip(everywhere["p"], case.parameters(model), strict=True)), "drifted"


@check
def frozen_while_another_model_is_trained(case: Case) -> None:
    """As a GAN does with its discriminator: thawed again, it is trained as if nothing had happened."""
    for accumulate in (1, 2):
        first, second = Recorded(case, accumulate), Recorded(case)
        step = case.strategy.train_step(
            second.model,
            second.optimizer,
            lambda m, x, y, other=first.model: (
                case.zoo.cross_entropy(m, x, y) + 0 * case.zoo.cross_entropy(other, x, y)
            ),
        )
        for n, (x, y) in enumerate(loader_of(case, batches=3, rest=2)):
            if n != 1:  # not at every step
                case.zoo.set_trained(first.model, False)
            second.remember(x, y)
            step(x, y)
            if n != 1:
                case.zoo.set_trained(first.model, True)
            first(x, y)
        first.is_serial()
        second.is_serial()


@check
def native_step_left_in_the_loop_is_refused(case: Case) -> None:
    model, optimizer = case.strategy.prepare(case.mlp(), SGD(0.5))
    case.strategy.train_step(model, optimizer, case.zoo.cross_entropy)(*batch(case))
    with refused(StateError, "step"):
        case.zoo.native_step(model, optimizer, *batch(case))


@check
def native_step_of_another_optimizer_is_noticed(case: Case) -> None:
    """One that was made of the same parameters, and that prepare() does not know: at once, or by the next save."""
    case.requires("lockstep")
    case.needs_ranks(2)
    for known in (True, False):
        model = case.strategy.prepare(case.mlp(), SGD(0.5) if known else None)
        model = model[0] if known else model
        other = case.zoo.native_sgd(model, 0.5)
        try:
            case.zoo.native_step(model, other, *batch(case))
        except StateError:
            continue
        parameters = case.parameters(model)
        everywhere = case.strategy.all_gather({"p": parameters})
        if all((a == b).all() for answer in everywhere for a, b in zip(answer["p"], parameters, strict=True)):
            continue  # the loss was one of global tensors
        with refused(RanksDisagree, "differs from rank 0"):
            case.strategy.save(case.folder / "apart", model=model)
        bring_together(case, model)


@check
def gradients_cleared_in_a_group_are_noticed(case: Case) -> None:
    model, optimizer = case.strategy.prepare(case.mlp(), SGD(0.5), accumulate=2)
    step = case.strategy.train_step(model, optimizer, case.zoo.cross_entropy)
    for _ in range(2):
        step(*batch(case))
    case.zoo.clear_gradients(model, optimizer)  # between two groups it does no harm
    step(*batch(case))
    case.zoo.clear_gradients(model, optimizer)
    with refused(StateError, "group"):
        step(*batch(case))


@check
def drift_is_found(case: Case) -> None:
    """At the end of a pass, and by save: the first parameter that differs is named."""
    case.requires("lockstep")
    case.needs_ranks(2)
    for found_by in ("pass", "save", "check_every"):
        every = 2 if found_by == "check_every" else 0
        model, optimizer = case.strategy.prepare(case.mlp(), SGD(0.01), check_every=every)
        step = case.strategy.train_step(model, optimizer, case.zoo.cross_entropy)
        step(*batch(case))
        name = part(case, model)
        with refused(RanksDisagree, name, f"rank {case.size - 1}"):
            if found_by == "save":
                case.strategy.save(case.folder / "drifted", model=model)
            elif found_by == "pass":
                for x, y in case.strategy.loader(reference.data(16 * case.size), per_device_batch=4):
                    step(x, y)
            else:
                step(*batch(case))
        bring_together(case, model)


def part(case: Case, model: object) -> str:
    """Change a parameter on the last rank only; its name."""
    names: list[str] = list(case.backend.state(model))
    values = dict(zip(names, case.parameters(model), strict=True))
    if case.rank == case.size - 1:
        values[names[2]] = values[names[2]] + np.float32(0.25)
    case.backend.load_state(model, values)
    everywhere = case.strategy.all_gather(case.parameters(model)[2])
    if all((answer == everywhere[0]).all() for answer in everywhere):
        raise DoesNotApply("servers hold the parameters, and have given rank 0's to everybody")
    return names[2]


def bring_together(case: Case, model: object) -> None:
    """Else it would be found again."""
    case.backend.load_state(model, dict(zip(case.backend.state(model), reference.weights(), strict=True)))

"""The state of an optimizer as a checkpoint holds it, under names that other frameworks read too.

A tensor is called after its parameter and what it is: "0.weight/velocity". The velocity is written in float64 and
without the rate that MXNet keeps inside: so it means the same everywhere, and comes back to the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import nd

from unidist.plugin import CheckpointError, check_range, expect
from unidist_mxnet.optimizers import FusedAdam, FusedSGD, set_rate


def saved_state(updater: mx.optimizer.Updater, names: list[str]) -> tuple[dict[str, nd.NDArray], dict[str, Any]]:
    """Tensors and plain values. What has not been updated yet has no state."""
    optimizer = updater.optimizer
    counts = {name: optimizer._index_update_count.get(n, 0) for n, name in enumerate(names)}
    rates = {name: optimizer.rates.get(n, 1.0) for n, name in enumerate(names)} if is_sgd(optimizer) else {}
    states = {name: leaves(updater.states.get(n)) for n, name in enumerate(names)}
    return described(optimizer, states, counts, rates, optimizer.num_update)


def described(
    optimizer: mx.optimizer.Optimizer,
    states: Mapping[str, list[nd.NDArray]],
    counts: dict[str, int],
    rates: dict[str, float],
    updates: int,
) -> tuple[dict[str, nd.NDArray], dict[str, Any]]:
    """States, by parameter, in the words of a checkpoint. `rates` are those inside the momenta of `FusedSGD`."""
    tensors: dict[str, nd.NDArray] = {}
    for name, state in states.items():
        for slot, array in zip(slots_of(optimizer, len(state)), state, strict=True):
            tensors[f"{name}/{slot}"] = array.astype("float64") / -rates[name] if slot == "velocity" else array
        if state and isinstance(optimizer, FusedAdam):
            tensors[f"{name}/step"] = nd.array([counts[name]], dtype="float32")  # as torch has it
    kept = {name: rate for name, rate in rates.items() if states[name]}
    values = {"kind": _kind(optimizer), "counts": counts, "rates": kept, "updates": updates}
    if isinstance(optimizer, mx.optimizer.Nadam):
        values["m_schedule"] = optimizer.m_schedule
    # One group, as other frameworks have it that allow several.
    return tensors, {**values, "groups": [{"lr": optimizer.learning_rate, "weight_decay": optimizer.wd}]}


@dataclass(frozen=True)
class Saved:
    """What a checkpoint says of an optimizer, checked: for each parameter that has been updated, its states as MXNet
    has them, how often that was, and the rate inside its momentum."""

    states: dict[str, list[np.ndarray]]
    counts: dict[str, int]
    rates: dict[str, float]
    updates: int
    m_schedule: float
    rate: float | None  # of a native optimizer, which may have been set by hand; a spec says its own


def checked(
    optimizer: mx.optimizer.Optimizer,
    weights: Mapping[str, nd.NDArray],
    arrays: Mapping[str, np.ndarray],
    values: Mapping[str, Any],
) -> Saved:
    (group,) = expect.optimizer(values, _kind(optimizer), 1)
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    found = expect.slots(arrays, shapes, values["kind"], alike=False)
    counts = {name: expect.count(f"{name}/step", kept["step"]) for name, kept in found.items() if "step" in kept}
    for name, count in expect.mapping("the optimizer's counts", values.get("counts", {})).items():
        if expect.whole(f"the optimizer's count of {name}", count, most=2**31 - 1):
            counts[name] = count
    rates = expect.mapping("the optimizer's rates", values.get("rates", {}))
    for name, rate in rates.items():
        if not expect.number(f"the optimizer's rate of {name}", rate):
            raise expect.refuse(f"the optimizer's rate of {name}", rate, "other than 0")
    stray = [name for name in (*counts, *rates) if name not in weights]
    if stray:
        raise CheckpointError(f"its optimizer is of another model: here is no parameter {stray[0]}")
    states: dict[str, list[np.ndarray]] = {}
    for name in [name for name in weights if name in found or name in counts]:
        kept, needed = found.get(name, {}), state_arrays(optimizer, weights[name])
        slots = slots_of(optimizer, len(needed))
        if "velocity" in slots and "velocity" not in kept:  # there was no momentum yet
            kept = {"velocity": np.zeros(shapes[name])}
        for slot, (shape, _) in zip(slots, needed, strict=True):
            if slot not in kept or kept[slot].shape != shape:
                raise CheckpointError(f"the optimizer's {name}/{slot} is missing or has another shape than {shape}")
        rate = rates.get(name, 1.0)
        states[name] = [kept[s].astype(np.float64) * -rate if s == "velocity" else kept[s] for s in slots]
        for slot, array, (_, dtype) in zip(slots, states[name], needed, strict=True):
            check_range(f"the optimizer's {name}/{slot}", array, dtype)
    fused = isinstance(optimizer, (FusedSGD, FusedAdam))
    return Saved(
        states,
        {name: counts.get(name, 0) for name in states},
        {name: rates.get(name, 1.0) for name in states},
        expect.whole("the optimizer's updates", values.get("updates", max(counts.values(), default=0))),
        expect.number("the optimizer's m_schedule", values.get("m_schedule", 1.0)),
        None if fused or optimizer.lr_scheduler else expect.number("the optimizer's lr", group.get("lr"), 0.0),
    )


def restore_state(updater: mx.optimizer.Updater, names: list[str], weights: list[nd.NDArray], saved: Saved) -> None:
    optimizer = updater.optimizer
    updater.states, updater.states_synced = {}, {}
    optimizer._set_current_context(weights[0].context.device_id)
    optimizer._index_update_count.clear()
    if is_sgd(optimizer):
        optimizer.rates.clear()  # a parameter without a momentum has no rate inside it
    for n, (name, weight) in enumerate(zip(names, weights, strict=True)):
        if name in saved.states:
            updater.states[n] = state = optimizer.create_state_multi_precision(n, weight)
            updater.states_synced[n] = True
            optimizer._index_update_count[n] = saved.counts[name]
            if is_sgd(optimizer):
                optimizer.rates[n] = saved.rates[name]
            for array, values in zip(leaves(state), saved.states[name], strict=True):
                array[:] = nd.array(values.astype(array.dtype), dtype=array.dtype)
    if isinstance(optimizer, mx.optimizer.Nadam):
        optimizer.m_schedule = saved.m_schedule
    if saved.rate is not None:
        set_rate(optimizer, saved.rate)
    optimizer.num_update = saved.updates


def follow(updater: mx.optimizer.Updater, key: int, weight: nd.NDArray) -> None:
    """The parameter was given other values. With multi_precision the next update would begin at its copy in float32,
    which has to follow it; but where the copy rounds to the parameter, it knows more of it."""
    optimizer = updater.optimizer
    if key not in updater.states or not optimizer.multi_precision or weight.dtype != np.float16:
        return
    probe = nd.full(1, 0.625, dtype="float16")
    state = leaves(optimizer.create_state_multi_precision(-1, probe))
    copies = [
        n for n, value in enumerate(state) if value.dtype == np.float32 and float(value.sum().asscalar()) == 0.625
    ]
    for n in copies:
        copy = leaves(updater.states[key])[n]
        exact = (copy.astype("float16") == weight).astype("float32")
        nd.where(exact, copy, weight.astype("float32")).copyto(copy)


def is_sgd(optimizer: mx.optimizer.Optimizer) -> bool:
    """With a momentum, which has a rate inside."""
    return isinstance(optimizer, FusedSGD) and bool(optimizer.momentum)


def slots_of(optimizer: mx.optimizer.Optimizer, leaves: int) -> tuple[str, ...]:
    """What a checkpoint calls the states that this optimizer keeps for a parameter."""
    if isinstance(optimizer, FusedSGD):
        return ("velocity",)[:leaves]
    if isinstance(optimizer, FusedAdam):
        return ("first_moment", "second_moment")[:leaves]
    return tuple(f"state{i}" for i in range(leaves))


def state_arrays(optimizer: mx.optimizer.Optimizer, weight: nd.NDArray) -> list[tuple[tuple[int, ...], Any]]:
    """(shape, dtype) of each array that the optimizer keeps for this parameter."""
    if isinstance(optimizer, (FusedSGD, FusedAdam)):
        count = 2 if isinstance(optimizer, FusedAdam) else int(is_sgd(optimizer))
        return [(tuple(weight.shape), weight.dtype)] * count
    made = leaves(optimizer.create_state_multi_precision(-1, weight))
    return [(tuple(array.shape), array.dtype) for array in made]


def _kind(optimizer: mx.optimizer.Optimizer) -> str:
    if isinstance(optimizer, FusedAdam):
        return "AdamW" if optimizer.decoupled else "Adam"
    return "SGD" if isinstance(optimizer, FusedSGD) else f"mx.optimizer.{type(optimizer).__name__}"


def leaves(state: Any) -> list[nd.NDArray]:
    if isinstance(state, nd.NDArray):
        return [state]
    return [leaf for value in state for leaf in leaves(value)] if isinstance(state, (list, tuple)) else []

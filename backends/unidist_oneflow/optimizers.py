"""unidist's optimizer specs as OneFlow's own optimizers, and the check of one that the user made."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import oneflow as flow

from unidist.plugin import (
    SGD,
    Adam,
    AdamW,
    OptimizerSpec,
    StateError,
    UsageError,
    check_own_parameters,
    check_range,
    expect,
)

# What unidist's checkpoints call an optimizer's tensors, so that another framework can read them.
PORTABLE = {"momentum_buf": "velocity", "exp_avg": "first_moment", "exp_avg_sq": "second_moment"}
NATIVE = {portable: key for key, portable in PORTABLE.items()}
KERNELS = {"contiguous_params", "fused"}  # settings that do not change what is computed


def native(spec: OptimizerSpec, parameters: list[Any]) -> Any:
    common: dict[str, Any] = {"lr": spec.rate(0), "weight_decay": spec.weight_decay}
    if isinstance(spec, Adam):
        # Its kernel takes them as float32, its bias correction as they are: 1 - 0.999 then differs by 1e-5.
        common["betas"] = tuple(float(np.float32(beta)) for beta in spec.betas)
    match spec:
        case SGD():
            return flow.optim.SGD(parameters, momentum=spec.momentum, nesterov=spec.nesterov, **common)
        case AdamW():  # before Adam, of which it is a kind
            return flow.optim.AdamW(parameters, eps=spec.eps, **common)
        case Adam():
            return flow.optim.Adam(parameters, eps=spec.eps, **common)
    raise UsageError(
        f"the oneflow backend does not know the optimizer spec {type(spec).__name__}: pass an oneflow.optim one"
    )


def check(optimizer: Any, model: Any) -> None:
    """An optimizer made for another copy of the model would move nothing, without an error."""
    if not isinstance(optimizer, flow.optim.Optimizer):
        raise UsageError(
            f"the optimizer is of type {type(optimizer).__name__}: pass unidist.SGD/Adam/AdamW or an oneflow.optim one"
        )
    check_groups(optimizer, model.parameters())


def check_groups(optimizer: Any, parameters: Iterable[Any]) -> None:
    held = [parameter for group in optimizer.param_groups for parameter in group.parameters]
    check_own_parameters(held, parameters)


def lengths(optimizer: Any) -> list[int]:
    """How many parameters each of its groups holds."""
    return [len(group.parameters) for group in optimizer.param_groups]


def guard(optimizer: Any, allowed: Callable[[Any], bool]) -> None:
    """Refuse steps that the user calls: they would apply what this rank alone has computed, and part the ranks."""
    reference = weakref.ref(optimizer)  # the optimizer must not keep itself alive
    replaced = vars(optimizer).get("step")

    def step(*arguments: Any, **named: Any) -> Any:
        optimizer = reference()
        if optimizer is None or not allowed(optimizer):
            raise StateError(
                "optimizer.step() was called directly, so this rank would go its own way: leave it to the callable of "
                "strategy.train_step, or write strategy.backward(loss) and strategy.step(optimizer)"
            )
        return replaced(*arguments, **named) if replaced else type(optimizer).step(optimizer, *arguments, **named)

    optimizer.step = step


def set_rate(optimizer: Any, rate: float | None) -> None:
    if rate is not None:
        for group in optimizer.param_groups:
            group["lr"] = rate


def state(named: Mapping[str, Any], optimizer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(tensors, plain values). OneFlow counts steps once for an optimizer, others for each parameter."""
    tensors: dict[str, Any] = {}
    for name, parameter in named.items():
        slots = optimizer._state.get(parameter, {})
        tensors.update({f"{name}/{PORTABLE.get(key, key)}": value for key, value in slots.items()})
        if "exp_avg" in slots:
            tensors[f"{name}/step"] = flow.tensor(float(optimizer._state["step"]))
    groups = [dict(group.options) for group in optimizer.param_groups]
    return tensors, {"kind": type(optimizer).__name__, "step": optimizer._state["step"], "groups": groups}


def checked_state(
    named: Mapping[str, Any],
    optimizer: Any,
    arrays: Mapping[str, np.ndarray],
    values: Mapping[str, Any],
    from_numpy: Callable[[np.ndarray], Any],
    with_settings: bool,
) -> Callable[[], None]:
    """Check that an optimizer of this kind can have this state, and return a function that restores it. With
    `with_settings`, those of a native optimizer come from the checkpoint."""
    current = [dict(group.options) for group in optimizer.param_groups]
    groups = expect.optimizer(values, type(optimizer).__name__, len(current))
    shapes = {name: tuple(parameter.shape) for name, parameter in named.items()}
    slots = expect.slots(arrays, shapes, values["kind"])
    for name, kept in slots.items():
        for slot, array in kept.items():
            check_range(f"the optimizer's {name}/{slot}", array, named[name].dtype)
    counts = [expect.count(f"{name}/step", kept["step"]) for name, kept in slots.items() if "step" in kept]
    step = expect.whole("the optimizer's step", values.get("step", max(counts, default=0)))
    pairs = enumerate(zip(groups, current, strict=True)) if with_settings else ()
    settings = [expect.settings(f"the optimizer's group {n}", *pair, KERNELS) for n, pair in pairs]

    def put() -> None:
        optimizer._state["step"] = step
        for name, parameter in named.items():
            optimizer._state[parameter] = {
                NATIVE.get(slot, slot): from_numpy(np.array(array)).to(parameter.dtype)
                for slot, array in slots.get(name, {}).items()
                if slot != "step"
            }
        for group, saved in zip(optimizer.param_groups, settings, strict=False):
            group.options.update(saved)

    return put

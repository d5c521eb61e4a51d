"""unidist's optimizer specs as OneFlow's own optimizers, and the check of one that the user made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import oneflow as flow

from unidist import SGD, Adam, AdamW, OptimizerSpec
from unidist.errors import UsageError

# What unidist's checkpoints call an optimizer's tensors, so that another framework can read them.
PORTABLE = {"momentum_buf": "velocity", "exp_avg": "first_moment", "exp_avg_sq": "second_moment"}


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
            f"the optimizer is a {type(optimizer).__name__}: pass unidist.SGD/Adam/AdamW or an oneflow.optim one"
        )
    own = {id(parameter) for parameter in model.parameters()}
    held = [id(parameter) for group in optimizer.param_groups for parameter in group.parameters]
    strangers = sum(each not in own for each in held)
    if strangers:
        raise UsageError(
            f"{strangers} of the optimizer's {len(held)} parameters are not the model's: make it from this model's "
            "parameters(), after any copy or conversion of the model"
        )


def set_rate(optimizer: Any, rate: float | None) -> None:
    if rate is not None:
        for group in optimizer.param_groups:
            group["lr"] = rate


def state(named: Mapping[str, Any], optimizer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(tensors, plain values). OneFlow counts steps once for an optimizer, others for each parameter."""
    tensors: dict[str, Any] = {}
    for name, parameter in named.items():
        own = optimizer._state.get(parameter, {})
        tensors.update({f"{name}/{PORTABLE.get(key, key)}": value for key, value in own.items()})
        if "exp_avg" in own:
            tensors[f"{name}/step"] = flow.tensor(float(optimizer._state["step"]))
    groups = [dict(group.options) for group in optimizer.param_groups]
    return tensors, {"kind": type(optimizer).__name__, "step": optimizer._state["step"], "groups": groups}


def load_state(
    named: Mapping[str, Any],
    optimizer: Any,
    arrays: Mapping[str, np.ndarray],
    values: Mapping[str, Any],
    from_numpy: Callable[[np.ndarray], Any],
    with_settings: bool,
) -> None:
    keys = {portable: key for key, portable in PORTABLE.items()}
    steps = [int(array) for name, array in arrays.items() if name.endswith("/step")]
    optimizer._state["step"] = values.get("step", max(steps, default=0))
    for parameter in named.values():
        optimizer._state[parameter] = {}
    for name, array in arrays.items():
        owner, _, key = name.rpartition("/")
        if key != "step":
            parameter = named[owner]
            optimizer._state[parameter][keys.get(key, key)] = from_numpy(np.array(array)).to(parameter.dtype)
    if with_settings:  # a native optimizer's settings come from the checkpoint
        for group, saved in zip(optimizer.param_groups, values.get("groups", []), strict=False):
            group.options.update({key: tuple(v) if isinstance(v, list) else v for key, v in saved.items()})

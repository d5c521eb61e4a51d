"""unidist's optimizer specs as OneFlow's own optimizers, and the check of one that the user made."""

from __future__ import annotations

from typing import Any

import numpy as np
import oneflow as flow

from unidist import SGD, Adam, AdamW, OptimizerSpec
from unidist.errors import UsageError


def native_optimizer(spec: OptimizerSpec, parameters: list[Any]) -> Any:
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


def check_optimizer(optimizer: Any, model: Any) -> None:
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

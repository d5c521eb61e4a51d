"""unidist's optimizer specs as torch's own optimizers."""

from __future__ import annotations

from typing import Any

import torch

from unidist.plugin import SGD, Adam, AdamW, OptimizerSpec, UsageError


def native_optimizer(spec: OptimizerSpec, parameters: list[Any]) -> torch.optim.Optimizer:
    common = {"lr": spec.rate(0), "weight_decay": spec.weight_decay}
    match spec:
        case SGD():
            return torch.optim.SGD(parameters, momentum=spec.momentum, nesterov=spec.nesterov, **common)
        case AdamW():  # before Adam, of which it is a kind
            return torch.optim.AdamW(parameters, betas=spec.betas, eps=spec.eps, **common)
        case Adam():
            return torch.optim.Adam(parameters, betas=spec.betas, eps=spec.eps, **common)
    raise UsageError(
        f"the torch backend does not know the optimizer spec {type(spec).__name__}: pass a torch.optim one"
    )

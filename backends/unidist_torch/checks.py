"""What can be trained, and what cannot: refused before anything is communicated."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from unidist.plugin import UnsupportedOperation, UsageError, check_own_parameters


def check_model(model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"this backend takes a torch.nn.Module, not an object of type {type(model).__name__}")


def check_parameters(model: torch.nn.Module, trained: bool) -> None:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise UsageError(
                f"parameter {name} of a lazy layer has no shape yet: call the model once, on a batch like those to "
                "come, before prepare()"
            )
    for name, module in model.named_modules():
        sparse = isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse
        if trained and sparse and module.weight.requires_grad:
            raise UnsupportedOperation(
                f"layer {name} has sparse gradients, which are not exchanged here: make it with sparse=False"
            )


def check_optimizer(optimizer: Any, model: Any) -> None:
    """An optimizer made for another copy of the model would move nothing, without an error."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"the optimizer is of type {type(optimizer).__name__}: pass unidist.SGD/Adam/AdamW or a torch.optim one"
        )
    arguments = inspect.signature(optimizer.step).parameters.values()
    if any(argument.name == "closure" and argument.default is argument.empty for argument in arguments):
        raise UsageError(
            f"{type(optimizer).__name__} computes the loss several times in a step, by a closure, and a step here "
            "computes it once: pass an optimizer whose step() needs none, such as SGD or AdamW"
        )
    check_groups(optimizer, model)


def check_groups(optimizer: Any, model: Any) -> None:
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    check_own_parameters(held, model.parameters())

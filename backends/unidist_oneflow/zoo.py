"""The conformance suite's models, in OneFlow (see `unidist.testing.case.Case`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn

from unidist.plugin import SIZES


def mlp() -> nn.Module:
    inputs, hidden, classes = SIZES
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, classes))


def with_buffers() -> nn.Module:
    inputs, hidden, classes = SIZES
    return nn.Sequential(nn.Linear(inputs, hidden), nn.BatchNorm1d(hidden), nn.Linear(hidden, classes))


def cross_entropy(model: nn.Module, x: flow.Tensor, y: flow.Tensor) -> flow.Tensor:
    return nn.functional.cross_entropy(model(x), y)


def per_sample_loss(model: nn.Module, x: flow.Tensor, y: flow.Tensor) -> flow.Tensor:
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def native_sgd(model: nn.Module, lr: float) -> flow.optim.Optimizer:
    return flow.optim.SGD(model.parameters(), lr=lr)


def local_step(model: nn.Module, x: flow.Tensor, y: flow.Tensor, lr: float) -> None:
    """One plain SGD step on this process alone; in float64, as OneFlow's batch normalisation of two rows that are near
    each other is off by 4e-4 in float32."""
    model.to(flow.float64)
    model.zero_grad()
    cross_entropy(model, x.to(flow.float64), y).backward()
    with flow.no_grad():
        for parameter in model.parameters():
            parameter -= lr * parameter.grad
    model.to(flow.float32)


def native_backward(model: nn.Module, x: flow.Tensor, y: flow.Tensor) -> None:
    if next(model.parameters()).is_global:
        x, y = (array.to_global(placement=flow.placement.all("cpu"), sbp=flow.sbp.split(0)) for array in (x, y))
    cross_entropy(model, x, y).backward()


def native_step(model: nn.Module, optimizer: flow.optim.Optimizer, x: flow.Tensor, y: flow.Tensor) -> None:
    """What the loop had before unidist."""
    native_backward(model, x, y)
    optimizer.step()


def clear_gradients(model: nn.Module, optimizer: flow.optim.Optimizer) -> None:
    optimizer.zero_grad()


def halve_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)


def set_trained(model: nn.Module, trained: bool) -> None:
    """Freeze or unfreeze the first layer."""
    for parameter in model[0].parameters():
        parameter.requires_grad_(trained)


def data_loader(dataset: Any, batch_size: int, shuffle: bool) -> flow.utils.data.DataLoader:
    return flow.utils.data.DataLoader(dataset, batch_size=batch_size, shuffle=shuffle)


def draw() -> np.ndarray[Any, Any]:
    """Three numbers from the generator that dropout uses."""
    numbers: np.ndarray[Any, Any] = flow.rand(3).numpy()
    return numbers

"""The conformance suite's models, in torch (see `unidist.testing.case.Case`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from unidist.plugin import SIZES


def mlp() -> nn.Module:
    inputs, hidden, classes = SIZES
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, classes))


def with_buffers() -> nn.Module:
    inputs, hidden, classes = SIZES
    return nn.Sequential(nn.Linear(inputs, hidden), nn.BatchNorm1d(hidden), nn.Linear(hidden, classes))


def cross_entropy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), y)


def per_sample_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def native_sgd(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def local_step(model: nn.Module, x: torch.Tensor, y: torch.Tensor, lr: float) -> None:
    """One plain SGD step on this process alone."""
    model.zero_grad()
    cross_entropy(model, x, y).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= lr * parameter.grad


def native_backward(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    cross_entropy(model, x, y).backward()


def native_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    """What the loop had before unidist."""
    native_backward(model, x, y)
    optimizer.step()


def clear_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()


def halve_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad.div_(2)


def set_trained(model: nn.Module, trained: bool) -> None:
    """Freeze or unfreeze the first layer."""
    for parameter in model[0].parameters():
        parameter.requires_grad_(trained)


def draw() -> np.ndarray[Any, Any]:
    """Three numbers from the generator that dropout uses."""
    numbers: np.ndarray[Any, Any] = torch.rand(3).numpy()
    return numbers


def data_loader(dataset: Any, batch_size: int, shuffle: bool) -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(dataset, batch_size=batch_size, shuffle=shuffle)

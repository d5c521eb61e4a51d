"""Neutral optimizer specs: `prepare` turns them into the framework's own, with the same arithmetic everywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from unidist.checks import is_number
from unidist.errors import UsageError

Rate = float | Callable[[int], float]


@dataclass(frozen=True)
class OptimizerSpec:
    """`lr` is a number, or a function of the number of updates made so far: `lr=lambda step: 0.1 * 0.99**step`."""

    lr: Rate
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if not callable(self.lr):
            self._number("lr", self.lr, 0.0, float("inf"))
        self._number("weight_decay", self.weight_decay, 0.0, float("inf"))

    def rate(self, step: int) -> float:
        """The learning rate of update number `step`, counted from 0."""
        if not callable(self.lr):
            return float(self.lr)
        rate = self.lr(step)
        self._number(f"lr({step})", rate, 0.0, float("inf"))
        return float(rate)

    def _number(self, name: str, value: object, low: float, below: float) -> None:
        if not is_number(value, low, below):
            raise UsageError(
                f"{type(self).__name__}: {name} is {value!r}, it must be a number from {low} to below {below}"
            )


@dataclass(frozen=True)
class SGD(OptimizerSpec):
    """velocity = momentum * velocity + gradient; parameter -= lr * velocity (lr outside the velocity)."""

    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._number("momentum", self.momentum, 0.0, 1.0)
        if self.nesterov and not self.momentum:
            raise UsageError("SGD: nesterov needs a momentum above 0")


@dataclass(frozen=True)
class Adam(OptimizerSpec):
    """Adam with bias correction, epsilon added after it; `weight_decay` is added to the gradient."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.betas, tuple) or len(self.betas) != 2:
            raise UsageError(f"{type(self).__name__}: betas is {self.betas!r}, it must be a pair such as (0.9, 0.999)")
        self._number("betas[0]", self.betas[0], 0.0, 1.0)
        self._number("betas[1]", self.betas[1], 0.0, 1.0)
        self._number("eps", self.eps, 0.0, float("inf"))


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay: the parameter shrinks by lr * weight_decay, apart from the gradient."""

    weight_decay: float = 0.01

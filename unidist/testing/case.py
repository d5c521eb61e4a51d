"""What a check is given: a running Strategy, the zoo of models in its framework, and a few helpers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from unidist.control.watch import debugging
from unidist.errors import UnsupportedOperation
from unidist.optim import OptimizerSpec
from unidist.strategy import Strategy
from unidist.testing import reference
from unidist.testing.refusals import ASKING

Check = Callable[["Case"], None]

CHECKS: dict[str, Check] = {}


class DoesNotApply(Exception):
    """A check raises it, on all ranks alike, with the reason why there is nothing to look at. It counts as skipped."""


def check(function: Check) -> Check:
    """Register a check. It runs on every rank, makes the same collective calls on each, and asserts at will.

    To `return` early is to pass: what does not apply says so by `case.requires` or `case.needs_ranks`.
    """
    if function.__name__ in CHECKS:
        raise ValueError(f"two checks are called {function.__name__}")
    CHECKS[function.__name__] = function
    return function


@dataclass(frozen=True)
class Case:
    """The zoo is a module with the backend's side of the suite:

    mlp()                         linear, tanh, linear, of `reference.SIZES`; `Backend.state` lists its arrays in order
    with_buffers()                the same with a batch normalisation in place of tanh
    cross_entropy(model, x, y)    the mean softmax cross-entropy, one number
    per_sample_loss(model, x, y)  the same before the mean
    native_sgd(model, lr)         the framework's own SGD over the model's parameters
    local_step(model, x, y, lr)   one plain SGD step of an unprepared model (for sync_batchnorm)
    data_loader(dataset, batch_size, shuffle)   the framework's own loader (for native_loader)
    draw()                        three numbers from the generator that dropout uses, as a numpy array
    native_backward(model, x, y)                forward and backward by the framework's own calls
    native_step(model, optimizer, x, y)         the same and an update
    clear_gradients(model, optimizer)           the framework's own zero_grad
    halve_gradients(model)                      divide them by 2, in place
    set_trained(model, trained)                 freeze or unfreeze the first layer
    """

    strategy: Strategy
    zoo: ModuleType
    said_at_start: str  # what this rank wrote to stderr while its Strategy began
    folder: Path  # the same for all ranks of the launch

    @property
    def rank(self) -> int:
        return self.strategy.rank

    @property
    def size(self) -> int:
        return self.strategy.world_size

    @property
    def backend(self) -> Any:
        """The backend below the Strategy, for what users do not need."""
        return self.strategy._backend

    def requires(self, *capabilities: str) -> None:
        """Go on where all of these are promised. One that is not must be refused, in its own words, and ends the check
        as one that does not apply."""
        for capability in capabilities:
            answer = getattr(self.strategy.capabilities, capability)
            if answer is True:
                continue
            for ask in ASKING.get(capability, ()):
                with refused(UnsupportedOperation, answer):
                    ask(self)
            raise DoesNotApply(f"{self.strategy.backend} does not promise {capability} here: {answer}")

    def needs_ranks(self, least: int) -> None:
        if self.size < least:
            raise DoesNotApply(f"it is about {least} ranks or more, and here is {self.size}")

    def needs_debugging(self) -> None:
        if not debugging():
            raise DoesNotApply("it is about what UNIDIST_DEBUG=1 adds, which other launches of the suite have set")

    def mlp(self, seed: int = 1) -> Any:
        """The zoo's model with the weights `reference.weights(seed)`."""
        model = self.zoo.mlp()
        self.backend.load_state(model, dict(zip(self.backend.state(model), reference.weights(seed), strict=True)))
        return model

    def parameters(self, model: Any) -> list[np.ndarray[Any, Any]]:
        return [self.backend.to_numpy(tensor) for tensor in self.backend.state(model).values()]

    def close_to_serial(self, model: Any, serial: reference.Serial) -> None:
        """Where a step is not promised to be the serial one, all that can be said is that it trains."""
        now = self.parameters(model)
        if self.strategy.capabilities.synchronous is True:
            close(now, serial.parameters)
        else:
            assert all(np.isfinite(array).all() for array in now), "not finite"
            assert any((array != then).any() for array, then in zip(now, reference.weights(), strict=True)), (
                "not trained"
            )

    def train(
        self,
        spec: OptimizerSpec,
        samples: int,
        *,
        per_device: int = 4,
        epochs: int = 2,
        accumulate: int = 1,
        clip_norm: float | None = None,
        tail: Any = "keep",
    ) -> tuple[Any, list[float]]:
        """Train the mlp through loader and train_step; the prepared model, and the global loss of each step."""
        model, optimizer = self.strategy.prepare(self.mlp(), spec, accumulate=accumulate)
        step = self.strategy.train_step(model, optimizer, self.zoo.cross_entropy, clip_norm=clip_norm)
        loader = self.strategy.loader(
            reference.data(samples), per_device_batch=per_device, shuffle=True, seed=3, tail=tail
        )
        return model, [self.strategy.mean(step(x, y)) for _ in range(epochs) for x, y in loader]

    def train_serially(
        self,
        spec: OptimizerSpec,
        samples: int,
        *,
        per_device: int = 4,
        epochs: int = 2,
        accumulate: int = 1,
        clip_norm: float | None = None,
        tail: Any = "keep",
    ) -> tuple[reference.Serial, list[float]]:
        """The same in NumPy, one step for each group of `accumulate` global batches."""
        from unidist.data.order import permutation

        x, y = reference.data(samples)
        serial = reference.Serial(reference.weights(), spec)
        whole = per_device * self.backend.devices * self.size
        losses = []
        for epoch in range(epochs):
            order = permutation(samples, 3, epoch)
            if tail == "drop":
                order = order[: samples // whole * whole]
            for first in range(0, len(order), whole * accumulate):
                rows = order[first : first + whole * accumulate]
                losses.append(serial.step(x[rows], y[rows], clip_norm))
        return serial, losses


def close(actual: Iterable[Any], expected: Iterable[Any], tolerance: float = 2e-6) -> None:
    """Equal to what float32 can hold after a few steps; the largest difference is named."""
    pairs = list(zip(list(actual), list(expected), strict=True))
    worst = max(float(np.max(np.abs(np.asarray(a, dtype=np.float64) - b))) if np.size(a) else 0.0 for a, b in pairs)
    assert math.isfinite(worst), "not finite"
    assert worst <= tolerance, f"differs by {worst:.3g}, more than {tolerance:g}"


def refused(kind: type[Exception], *words: str) -> Refused:
    """`with refused(UsageError, "global_batch"):` the block must raise that, saying these words."""
    return Refused(kind, words)


class Refused:
    def __init__(self, kind: type[Exception], words: tuple[str, ...]) -> None:
        self._kind, self._words = kind, words

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        assert error is not None, f"{self._kind.__name__} was not raised"
        if not isinstance(error, self._kind):
            return False
        for word in self._words:
            assert word in str(error), f"{word!r} is not said in: {error}"
        return True

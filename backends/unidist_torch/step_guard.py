"""Optimizers that the user steps by hand: they would apply what one rank has computed, and part the ranks."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from unidist.plugin import StateError
from unidist_torch.checks import check_groups

STEPPED = (
    "optimizer.step() was called directly, for parameters of a prepared model, so this rank would go its own way: give "
    "the optimizer to prepare(model, optimizer), and leave its step to the callable of strategy.train_step, or write "
    "strategy.backward(loss) and strategy.step(optimizer)"
)


class StepGuard:
    """Refuses steps of optimizers that hold parameters of a prepared model, unless they are ours."""

    def __init__(self) -> None:
        self._stepping: Any = None  # the optimizer whose step is ours
        self._equal: weakref.WeakSet[Any] = weakref.WeakSet()  # models that are to stay equal on all ranks
        self._unrelated: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers that hold no parameter of these
        # How many parameters each group of a prepared optimizer holds.
        self._lengths: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
        self._hook: Any = None  # sees the steps of all optimizers
        self._closed = False

    def close(self) -> None:
        self._closed = True
        if self._hook is not None:
            self._hook.remove()

    @contextmanager
    def stepping(self, optimizer: Any) -> Iterator[None]:
        """Inside, a step of this optimizer is ours."""
        self._stepping = optimizer
        try:
            yield
        finally:
            self._stepping = None

    def watch(self, optimizer: Any) -> None:
        """An optimizer that was prepared."""
        optimizer.register_step_pre_hook(self._refuse)
        self._lengths[optimizer] = _lengths(optimizer)

    def check_groups(self, optimizer: Any, model: Any) -> None:
        """Refuse what add_param_group has brought that is not of the model. The parameters are only looked at where
        their number has changed."""
        lengths = _lengths(optimizer)
        if lengths != self._lengths[optimizer]:
            check_groups(optimizer, model)
            self._lengths[optimizer] = lengths

    def keep_equal(self, model: Any) -> None:
        """Any optimizer that holds parameters of this model would part the ranks."""
        self._equal.add(model)
        self._unrelated.clear()
        if self._hook is None:
            refuse = weakref.WeakMethod(self._refuse_related)  # torch keeps the hook, of a dropped Strategy too
            self._hook = register_optimizer_step_pre_hook(
                lambda optimizer, *_: found(optimizer) if (found := refuse()) is not None else None
            )

    def _refuse(self, optimizer: Any, *_: Any) -> None:
        if self._stepping is not optimizer and not self._closed:
            raise StateError(STEPPED)

    def _refuse_related(self, optimizer: Any) -> None:
        if self._stepping is not None or optimizer in self._unrelated:  # ours may step another one inside
            return
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if any(id(parameter) in held for model in self._equal for parameter in model.parameters()):
            raise StateError(STEPPED)
        self._unrelated.add(optimizer)


def _lengths(optimizer: Any) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]

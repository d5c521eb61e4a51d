"""Hooks into a model: what it is called with, and gradients that are to be nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class InputHook:
    """Tells what a model is called with. A copy of the model, or one that was pickled, tells nobody."""

    def __init__(self, listener: Callable[[tuple[Any, ...]], None] | None = None) -> None:
        self._listener = listener

    def __call__(self, _: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self._listener is not None:
            self._listener((*arguments, named))

    def __reduce__(self) -> tuple[Any, ...]:
        return InputHook, ()


@contextmanager
def adding_nothing(model: Any) -> Iterator[None]:
    """A loss that weighs nothing may be not a number, as the mean over no token is, and 0 times that is not 0. Whoever
    waits for gradients gets them all the same."""
    hooks = [parameter.register_hook(torch.zeros_like) for parameter in model.parameters() if parameter.requires_grad]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()

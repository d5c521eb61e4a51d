"""Parameters of a prepared model: whatever is done to them behind the step's back is noticed when it happens, so that
no step has to look at each of them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

from mxnet import gluon

from unidist.plugin import StateError

# What Gluon assigns when a parameter is frozen, unfrozen, cast, moved or made anew, and what users set on it.
SETTLED = frozenset(("_grad_req", "_data", "_grad", "lr_mult", "wd_mult"))
TRAINER = {
    "step": ("would train this worker alone", "train_step or strategy.step(…)"),
    "update": ("would train this worker alone", "train_step or strategy.step(…)"),
    "allreduce_grads": ("would train this worker alone", "train_step or strategy.step(…)"),
    "save_states": ("knows nothing of the other workers", "strategy.save"),
    "load_states": ("knows nothing of the other workers", "strategy.load"),
}


class Owner(Protocol):
    disturbed: bool  # set when one of its parameters is not what it was
    released: bool  # the Strategy is closed: parameters are the user's again

    def gradient_shown(self, parameter: gluon.Parameter) -> None: ...

    def value_set(self, parameter: gluon.Parameter) -> None: ...


def _owners(parameter: Any) -> Iterator[Owner]:
    for reference in getattr(parameter, "_owners", ()):
        if (owner := reference()) is not None and not owner.released:
            yield owner


def watch(parameter: gluon.Parameter, owner: Owner) -> None:
    watchers = [reference for reference in getattr(parameter, "_owners", ()) if reference() is not None]
    parameter._owners = [*watchers, weakref.ref(owner)]
    if not watchers and not type(parameter).__name__.startswith("Watched"):
        kind: type = type(parameter)
        parameter.__class__ = _watched(kind)
    if parameter._trainer is not None:
        refuse_trainer(parameter._trainer)


@functools.cache
def _watched(kind: Any) -> Any:
    def assign(self: Any, name: str, value: Any) -> None:
        kind.__setattr__(self, name, value)
        if name in SETTLED:
            for owner in _owners(self):
                owner.disturbed = True
        elif name == "_trainer" and value is not None:
            refuse_trainer(value)

    def shows(method: Any) -> Any:
        @functools.wraps(method)
        def show(self: Any, *arguments: Any) -> Any:
            for owner in _owners(self):
                owner.gradient_shown(self)
            return method(self, *arguments)

        return show

    def set_data(self: Any, data: Any) -> None:
        kind.set_data(self, data)
        for owner in _owners(self):
            owner.value_set(self)

    showing = {name: shows(getattr(kind, name)) for name in ("grad", "list_grad", "zero_grad")}
    return type(f"Watched{kind.__name__}", (kind,), {"__setattr__": assign, "set_data": set_data, **showing})


def refuse_trainer(trainer: gluon.Trainer) -> None:
    """A Trainer of parameters that were prepared, before or after that; until the Strategy is closed."""
    for name, (problem, instead) in TRAINER.items():
        why = f"Trainer.{name}() {problem}: its model was given to prepare(), use {instead}"
        setattr(trainer, name, _refused(why, trainer, getattr(type(trainer), name)))


def _refused(why: str, trainer: gluon.Trainer, method: Any) -> Any:
    def refuse(*arguments: Any, **named: Any) -> Any:
        if any(True for param in trainer._params for _ in _owners(param)):
            raise StateError(why)
        return method(trainer, *arguments, **named)

    return refuse


def guard(optimizer: Any) -> Guard:
    """The one of this optimizer."""
    if "_guard" not in vars(optimizer):
        optimizer._guard = Guard(optimizer)
    held: Guard = optimizer._guard
    held.released = False
    return held


class Guard:
    """Lets an optimizer move parameters only inside `with guard:`, which is the step, until the Strategy is closed."""

    released: bool

    def __init__(self, optimizer: Any) -> None:
        self._stepping = False
        for name in ("update", "update_multi_precision"):
            setattr(optimizer, name, self._guarded(getattr(optimizer, name)))

    def _guarded(self, update: Any) -> Any:
        @functools.wraps(update)
        def guarded(*arguments: Any) -> Any:
            if not (self._stepping or self.released):
                raise StateError(
                    "the optimizer's own update was called, so this worker would go its own way: leave it to the "
                    "callable of strategy.train_step, or write strategy.backward(loss) and strategy.step(optimizer)"
                )
            return update(*arguments)

        return guarded

    def __enter__(self) -> None:
        self._stepping = True

    def __exit__(self, *_: object) -> None:
        self._stepping = False

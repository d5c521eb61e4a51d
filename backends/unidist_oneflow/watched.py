"""Tensors of prepared models: what is done to them behind the step's back is noticed when it happens, so that no step
has to look at each of them.

OneFlow's tensors take no attributes and no other class than their own, so it is that class that tells.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import oneflow as flow

Tensor = Any

SETTLED = ("requires_grad", "grad")  # attributes whose assignment is told
CHANGING = ("requires_grad_", "_zero_grad_")  # methods whose call is told


class Owner(Protocol):
    def touched(self, tensor: Tensor, what: str) -> None:
        """This attribute of one of its tensors was set, or this method called."""


_owners: dict[int, weakref.ref[Owner]] = {}  # by identity of the tensor, which its owner keeps alive


def watch(tensors: Iterable[Tensor], owner: Owner) -> None:
    _install()
    entries = {id(tensor): weakref.ref(owner) for tensor in tensors}
    _owners.update(entries)
    weakref.finalize(owner, _forget, entries)


def _forget(entries: dict[int, weakref.ref[Owner]]) -> None:
    for key, owner in entries.items():
        if _owners.get(key) is owner:  # else the number has been given to a tensor of another owner
            del _owners[key]


def _tell(tensor: Tensor, what: str) -> None:
    found = _owners.get(id(tensor))
    if found is not None and (owner := found()) is not None:
        owner.touched(tensor, what)


@functools.cache
def _install() -> None:
    for name in SETTLED:
        setattr(flow.Tensor, name, _attribute(name, getattr(flow.Tensor, name)))
    for name in CHANGING:
        setattr(flow.Tensor, name, _method(name, getattr(flow.Tensor, name)))


def _attribute(name: str, native: Any) -> property:
    def assign(self: Tensor, value: Any) -> None:
        native.__set__(self, value)
        _tell(self, name)

    return property(native.__get__, assign, doc=native.__doc__)


def _method(name: str, native: Any) -> Any:
    @functools.wraps(native)
    def call(self: Tensor, *arguments: Any, **named: Any) -> Any:
        result = native(self, *arguments, **named)
        _tell(self, name)
        return result

    return call

"""What is inside of nested values: mappings, lists, tuples, named tuples and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any


@functools.lru_cache(256)  # each step asks, and to ask abstract classes takes long
def _looks_inside(kind: type) -> Callable[[Any], Iterable[tuple[Any, Any]]] | None:
    if issubclass(kind, (list, tuple)):
        return enumerate
    names = [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
    if hasattr(kind, "shape") and "shape" not in names:
        return None  # an array that is a mapping or a dataclass, too
    if issubclass(kind, Mapping):
        return lambda value: ((key, value[key]) for key in value)
    if dataclasses.is_dataclass(kind):
        return lambda value: ((name, getattr(value, name, None)) for name in names)
    return None


def items_of(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """(key, part) of each part of a container; None for anything else."""
    kind: Any = type(value)
    look = _looks_inside(kind)
    return None if look is None else look(value)


def leaves_of(value: Any) -> list[Any]:
    """Everything that is no container, in order."""
    items = items_of(value)
    return [value] if items is None else [leaf for _, part in items for leaf in leaves_of(part)]


def arrays_of(value: Any) -> list[Any]:
    """The arrays with at least one axis, in order."""
    return [leaf for leaf in leaves_of(value) if getattr(leaf, "shape", None)]


def map_leaves(change: Callable[[Any], Any], value: Any, lists: type = list) -> Any:
    """The same nesting with `change` done to everything that is no container; lists become `lists`."""
    items = items_of(value)
    if items is None:
        return change(value)
    parts = {key: map_leaves(change, part, lists) for key, part in items}
    if isinstance(value, (list, tuple)):
        if hasattr(value, "_fields"):  # a named tuple takes them apart
            return type(value)(*parts.values())
        return (lists if type(value) is list else type(value))(parts.values())
    if isinstance(value, Mapping) and not isinstance(value, (dict, UserDict)):
        return parts  # a copy of it may share what is inside with the user's
    changed = copy.copy(value)
    for key, part in parts.items():
        if isinstance(changed, (dict, UserDict)):
            changed[key] = part
        else:
            object.__setattr__(changed, key, part)  # it may be frozen
    return changed

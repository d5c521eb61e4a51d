"""A Python number out of whatever holds one: numbers, numpy scalars, tensors of any framework, a function of none."""

from __future__ import annotations

import math
from typing import Any

from unidist.errors import UsageError


def check_one(name: str, value: Any) -> None:
    """Refuse what holds several numbers, without reading it."""
    shape = getattr(value, "shape", ())
    if shape and math.prod(shape) != 1:
        raise UsageError(f"{name} has shape {tuple(shape)}, it must be one number: call .mean()")


def number(name: str, value: Any) -> int | float:
    """Reading a tensor may wait for its device: call this when the number is printed, not at every step."""
    if callable(value) and not hasattr(value, "shape"):
        value = value()
    if isinstance(value, bool):
        return int(value)
    if type(value) in (int, float):
        return value  # type: ignore[no-any-return]
    check_one(name, value)
    for convert in ("item", "asscalar", "__float__"):  # asscalar: what numpy once called item
        if hasattr(value, convert):
            converted = getattr(value, convert)()
            if isinstance(converted, (bool, int, float)):
                return int(converted) if isinstance(converted, bool) else converted
    raise UsageError(f"{name} is of type {type(value).__name__}, it must be one number")

"""Python values to strict JSON and back, unchanged: nan, infinities, tuples and integer keys included.

What JSON has no form for is an object with one key that begins with "$": {"$float": "nan"}, {"$tuple": […]},
{"$items": [[key, value], …]} (a dict with other keys than strings, or with keys that begin with "$" themselves).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from unidist.errors import UsageError

LONGEST = 13_000  # bits of a whole number: of those with more than 4,300 digits Python makes no text
DEEPEST = 100  # a value that holds itself would go on for ever


def encode(value: Any, path: str = "values", depth: int = 0) -> Any:
    """`value` in terms that JSON has. What cannot come back as it was is refused, with the path to it."""
    if depth > DEEPEST:
        raise UsageError(f"{path[:200]}… is nested more than {DEEPEST} deep: does it hold itself?")
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) is int and value.bit_length() > LONGEST:
        raise UsageError(f"{path} is a whole number of some {value.bit_length() * 3 // 10} digits: keep it as a string")
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if type(value) in (list, tuple):
        parts = [encode(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
        return {"$tuple": parts} if type(value) is tuple else parts
    if isinstance(value, Mapping):
        items = [(encode(key, f"{path} key {key!r}", depth + 1), value[key]) for key in value]
        if any(not (key is None or isinstance(key, (str, int))) for key, _ in items):
            raise UsageError(f"{path} has a key that is not a string, an int, a bool or None")
        encoded = [(key, encode(content, f"{path}[{key!r}]", depth + 1)) for key, content in items]
        if all(isinstance(key, str) and not key.startswith("$") for key, _ in encoded):
            return dict(encoded)
        return {"$items": [list(pair) for pair in encoded]}
    is_array = hasattr(value, "__array__") and not isinstance(value, np.generic)
    advice = ". Convert an array or tensor first: use .tolist() or .item()" if is_array else ""
    raise UsageError(
        f"{path} is of type {type(value).__name__}, a checkpoint's values are numbers, strings, bools, None, and "
        f"dicts, lists and tuples of them{advice}"
    )


def decode(value: Any, depth: int = 0) -> Any:
    """The inverse. A form that `encode` does not make raises ValueError."""
    if depth > DEEPEST + 1:
        raise ValueError(f"values are nested more than {DEEPEST} deep")
    if isinstance(value, list):
        return [decode(item, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    marks = [key for key in value if key.startswith("$")]
    if not marks:
        return {key: decode(item, depth + 1) for key, item in value.items()}
    match value:
        case {"$float": "nan" | "inf" | "-inf" as text} if len(value) == 1:
            return float(text)
        case {"$tuple": [*parts]} if len(value) == 1:
            return tuple(decode(part, depth + 1) for part in parts)
        case {"$items": [*pairs]} if len(value) == 1 and all(map(_is_item, pairs)):
            return {key: decode(content, depth + 1) for key, content in pairs}
    raise ValueError(f"unknown form {marks[0][:80]!r}")


def _is_item(pair: object) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and (pair[0] is None or isinstance(pair[0], (str, int)))

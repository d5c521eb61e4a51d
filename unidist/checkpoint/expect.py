"""What a checkpoint's values must be. Each check returns what it was given, or says what is wrong with it, by name.

A file may have been damaged, written by another program, or made to mislead: nothing in it is used before it was here.
"""

from __future__ import annotations

import math
import reprlib
import sys
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from unidist.checks import is_number, is_whole
from unidist.errors import CheckpointError

Array = np.ndarray[Any, Any]

MOST = sys.float_info.max
LARGEST = 2**53  # whole numbers up to here are exact in every format on the way

# What an optimizer of this kind keeps for a parameter, under the portable names; other kinds have names of their own.
SLOTS = {
    "SGD": {"velocity"},
    "Adam": {"first_moment", "second_moment", "step"},
    "AdamW": {"first_moment", "second_moment", "step"},
}


def refuse(what: str, value: object, wanted: str) -> CheckpointError:
    return CheckpointError(f"{what} is {reprlib.repr(value)}, it must be {wanted}")


def mapping(what: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise refuse(what, value, "an object with names")
    return value


def text(what: str, value: object) -> str:
    if not isinstance(value, str):
        raise refuse(what, value, "a string")
    return value


def whole(what: str, value: object, least: int = 0, most: int = LARGEST) -> int:
    if not is_whole(value, least, most):
        raise refuse(what, value, f"a whole number from {least} to {most}")
    return value


def number(what: str, value: object, least: float = -math.inf) -> float:
    if not is_number(value, max(least, -MOST)) or value > MOST:
        raise refuse(what, value, "a finite number" + (f" from {least:g}" if math.isfinite(least) else ""))
    return value


def array(what: str, value: object, dtype: Any, shape: tuple[int, ...]) -> Array:
    if not isinstance(value, np.ndarray) or value.dtype != dtype or value.shape != shape:
        found = f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else "missing"
        raise CheckpointError(f"{what} is {found}, it must be {np.dtype(dtype)} {shape}")
    return value


def like(what: str, value: object, own: object) -> Any:
    """A setting that can take the place of `own`: the same type, finite, and not negative where `own` is not."""
    if isinstance(own, (list, tuple)):
        if not isinstance(value, (list, tuple)) or len(value) != len(own):
            raise refuse(what, value, f"{len(own)} values, such as {own!r}")
        return type(own)(like(f"{what}[{i}]", *pair) for i, pair in enumerate(zip(value, own, strict=True)))
    if isinstance(own, (int, float)) and not isinstance(own, bool):
        found = number(what, value, 0.0 if own >= 0 else -math.inf)
        return found if abs(found) <= LARGEST else float(found)  # kernels take no larger whole numbers
    if not isinstance(value, (bool, type(None)) if own is None else (type(own), type(None))):
        raise refuse(what, value, f"a setting such as {own!r}")
    return value


def settings(
    what: str, saved: Mapping[str, Any], own: Mapping[str, Any], kernels: Collection[str] = ()
) -> dict[str, Any]:
    """Those of `saved` that `own` has too: versions of a framework, and frameworks, do not have all in common. Which
    of its `kernels` compute an update is the matter of the optimizer that is here, and of its device."""
    common = [key for key in saved if key in own and key not in kernels]
    return {key: like(f"{what} {key}", saved[key], own[key]) for key in common}


def optimizer(values: object, kind: str, groups: int) -> list[dict[str, Any]]:
    """The saved parameter groups, of an optimizer that is like the one here."""
    held = mapping("the optimizer", values)
    saved = text("the optimizer's kind", held.get("kind"))
    if saved != kind:
        raise CheckpointError(f"it was saved with the optimizer {saved}, here it is {kind}")
    found = held.get("groups")
    if not isinstance(found, list):
        raise refuse("the optimizer's groups", found, "a list")
    if len(found) != groups:
        raise CheckpointError(f"its optimizer has {len(found)} parameter groups, here it has {groups}")
    return [mapping(f"the optimizer's group {n}", group) for n, group in enumerate(found)]


def slots(
    arrays: Mapping[str, Array],
    shapes: Mapping[str, tuple[int, ...]],
    kind: str,
    plain: Collection[str] = (),
    alike: bool = True,
) -> dict[str, dict[str, Array]]:
    """An optimizer's arrays as {parameter: {slot: array}}. `shapes` are those of the parameters that it may have;
    `plain` names the slots that are no arrays. Slots are `alike` where all parameters have the same, of their shapes;
    else the caller knows which there are."""
    portable = SLOTS.get(kind, set())
    found: dict[str, dict[str, Array]] = {}
    for name, value in arrays.items():
        parameter, _, slot = name.rpartition("/")
        if parameter not in shapes or (alike and value.size != 1 and value.shape != shapes[parameter]):
            raise CheckpointError(
                f"its optimizer is of another model: {slot} of {parameter or 'nothing'} {value.shape} does not fit"
            )
        if value.dtype.kind not in "biuf" or (slot in portable and value.dtype.kind != "f"):
            raise CheckpointError(f"the optimizer's {name} has dtype {value.dtype}")
        if slot == "step":
            count(name, value)
        elif slot in portable and value.shape != shapes[parameter]:
            raise CheckpointError(f"the optimizer's {name} is {value.shape}, its parameter {shapes[parameter]}")
        found.setdefault(parameter, {})[slot] = value
    kept = {slot for held in found.values() for slot in held}
    needed = portable if kept & portable else kept if alike else set()  # another class of that name may keep others
    for parameter, held in found.items():
        absent = [slot for slot in sorted(needed) if slot not in held and f"{parameter}/{slot}" not in plain]
        if absent:
            raise CheckpointError(f"the optimizer's {parameter}/{absent[0]} is missing")
    return found


def count(what: str, value: Array) -> int:
    """A number of steps that is kept in an array, as torch does."""
    number = float(value.reshape(-1)[0]) if value.shape in ((), (1,)) else -1.0
    if not (0 <= number <= LARGEST and number == int(number)):
        raise CheckpointError(f"{what} is {reprlib.repr(value.tolist())}, it must count steps")
    return int(number)

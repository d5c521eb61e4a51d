"""What an array is called, and whether what was read fits a model.

The portable names are torch's, without any wrapper's prefix. A backend whose framework has others translates them;
what only some frameworks have, their plug-ins declare.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from unidist import registry
from unidist.errors import CheckpointError

Array = np.ndarray[Any, Any]
Spec = tuple[Sequence[int], Any]  # shape, and the dtype as any framework spells it, or None for any

SHOWN = 8

# The least and the largest that a dtype can hold.
LIMITS: dict[str, tuple[float, float]] = {
    **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32, 64)},
    "float16": (-65504.0, 65504.0),
    "float32": (-3.4028234663852886e38, 3.4028234663852886e38),
    "bfloat16": (-3.3895313892515355e38, 3.3895313892515355e38),
}


def strip_prefix(arrays: Mapping[str, Array], expected: Iterable[str] = ()) -> dict[str, Array]:
    """Remove wrappers' prefixes that every name has, unless the model's own names (`expected`) have them too."""
    stripped, model_names = dict(arrays), set(expected)
    wrappers = [prefix for plugin in registry.loadable() for prefix in plugin.names.wrappers]
    while stripped and not model_names.intersection(stripped):
        wrapper = next((prefix for prefix in wrappers if all(name.startswith(prefix) for name in stripped)), None)
        if wrapper is None:
            break
        stripped = {name[len(wrapper) :]: array for name, array in stripped.items()}
    return stripped


def fit(arrays: Mapping[str, Array], expected: Mapping[str, Spec], what: str = "the model") -> dict[str, Array]:
    """The arrays for exactly the names in `expected`, in that order; CheckpointError when they do not fit, by name,
    shape or kind, or because the dtype here cannot hold their values."""
    found = strip_prefix(arrays, expected)
    extra = {ending: dtype for plugin in registry.loadable() for ending, dtype in plugin.names.extra.items()}
    for ending, dtype in extra.items():
        for name in [name for name in found if _ends(name, ending) and name not in expected]:
            del found[name]
        # Only where the layer itself is there: else the missing layer would be hidden.
        for name in [name for name in expected if _ends(name, ending) and name not in found]:
            if any(other.startswith(name[: -len(ending)]) for other in found):
                found[name] = np.zeros((), dtype)
    compare(expected, found, what)
    for name in expected:
        check_range(name, found[name], expected[name][1])
    return {name: found[name] for name in expected}


def compare(expected: Mapping[str, Spec], found: Mapping[str, Array], what: str = "the model") -> None:
    """Raise CheckpointError with the first names that differ.

    Shapes must be the same. A dtype may have another width of the same kind: float32 fits a bfloat16 model.
    """
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected]
    shapes = [name for name in expected if name in found and found[name].shape != tuple(expected[name][0])]
    kinds = [
        name
        for name in expected
        if name in found and name not in shapes and _kind(expected[name][1]) not in (None, _kind(found[name].dtype))
    ]
    if not (missing or unexpected or shapes or kinds):
        return

    def near(name: str, among: list[str]) -> str:
        close = difflib.get_close_matches(name, among, n=1, cutoff=0.5)
        return f" (nearest: {close[0]})" if close else ""

    lines = [
        *(f"  missing     {name} {tuple(expected[name][0])}{near(name, unexpected)}" for name in missing[:SHOWN]),
        *(f"  unexpected  {name} {found[name].shape}{near(name, missing)}" for name in unexpected[:SHOWN]),
        *(
            f"  shape       {name} is {found[name].shape}, {what} has {tuple(expected[name][0])}"
            for name in shapes[:SHOWN]
        ),
        *(f"  dtype       {name} is {found[name].dtype}, {what} has {expected[name][1]}" for name in kinds[:SHOWN]),
    ]
    total = len(missing) + len(unexpected) + len(shapes) + len(kinds)
    more = [f"  … and {total - len(lines)} more"] if total > len(lines) else []
    raise CheckpointError(
        f"the checkpoint does not fit {what}: {len(missing)} names missing, {len(unexpected)} unexpected, "
        f"{len(shapes)} of another shape, {len(kinds)} of another dtype.\n" + "\n".join(lines + more)
    )


def check_tied(arrays: Mapping[str, Array], holders: Mapping[str, object]) -> None:
    """Where two names mean one and the same array of the model, by its holder, both must have the same values."""
    first: dict[int, str] = {}
    for name in arrays:
        other = first.setdefault(id(holders[name]), name)
        kind = arrays[name].dtype.kind
        if other != name and not np.array_equal(arrays[name], arrays[other], equal_nan=kind == "f"):
            raise CheckpointError(
                f"{other} and {name} are one array in the model, and two that differ in the checkpoint"
            )


def _ends(name: str, ending: str) -> bool:
    return name.rpartition(".")[2] == ending


def _text(dtype: Any) -> str:
    """ "float32", of numpy's, torch's ("torch.float32") and OneFlow's dtypes alike."""
    text: str = getattr(dtype, "__name__", None) or str(dtype)  # MXNet says <class 'numpy.float32'>
    return text.rpartition(".")[2]


def _kind(dtype: Any) -> str | None:
    """ "float", "int", "bool" or "complex"."""
    if dtype is None:
        return None
    text = _text(dtype)
    return next((kind for kind in ("complex", "float", "int", "bool") if kind in text), text)


def check_range(name: str, array: Array, dtype: Any) -> None:
    """Another width of the same kind is fine, as long as 300 does not become 44, or 1e300 infinite."""
    text = _text(dtype)
    finite = array[np.isfinite(array)] if array.dtype.kind == "f" and text != array.dtype.name else array
    if text not in LIMITS or text == array.dtype.name or not finite.size:
        return
    low, high = finite.min().item(), finite.max().item()
    if low < LIMITS[text][0] or high > LIMITS[text][1]:
        raise CheckpointError(f"{name} has values from {low:g} to {high:g}, which {text} cannot hold")

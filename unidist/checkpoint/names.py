"""What an array is called: the rules between frameworks, as data, and whether what was read fits a model.

The portable names are torch's, without any wrapper's prefix; OneFlow's are the same. Gluon's structural names
(`_collect_params_with_prefix`) differ in the last parts only, and no array needs a transpose.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from unidist.errors import CheckpointError

Array = np.ndarray[Any, Any]
Spec = tuple[Sequence[int], Any]  # shape, and the dtype as any framework spells it, or None for any

WRAPPERS = ("module.", "_orig_mod.")  # DataParallel and DDP; torch.compile

# Gluon -> torch, on the end of a name; the first that matches.
GLUON = tuple(
    (re.compile(rf"(^|\.){pattern}$"), replacement)
    for pattern, replacement in (
        # rnn.LSTM, GRU, RNN: layer, direction (only when there are two), input or hidden, kind
        (r"_unfused\.(\d+)\.l_cell\.i2h_(weight|bias)", r"\1\3_ih_l\2"),
        (r"_unfused\.(\d+)\.l_cell\.h2h_(weight|bias)", r"\1\3_hh_l\2"),
        (r"_unfused\.(\d+)\.r_cell\.i2h_(weight|bias)", r"\1\3_ih_l\2_reverse"),
        (r"_unfused\.(\d+)\.r_cell\.h2h_(weight|bias)", r"\1\3_hh_l\2_reverse"),
        (r"_unfused\.(\d+)\.i2h_(weight|bias)", r"\1\3_ih_l\2"),
        (r"_unfused\.(\d+)\.h2h_(weight|bias)", r"\1\3_hh_l\2"),
        (r"i2h_(weight|bias)", r"\1\2_ih"),  # rnn.LSTMCell and its like
        (r"h2h_(weight|bias)", r"\1\2_hh"),
        (r"gamma", r"\1weight"),  # every normalisation
        (r"beta", r"\1bias"),
        (r"alpha", r"\1weight"),  # PReLU
    )
)

# Buffers that only some frameworks have. Dropped where the model lacks them, filled in where the file does:
# torch counts the batches of a BatchNorm, and uses the count only when its momentum is None.
ONLY_SOME: dict[str, Array] = {"num_batches_tracked": np.zeros((), np.int64)}

SHOWN = 8


def from_gluon(names: Iterable[str]) -> dict[str, str]:
    """Gluon name -> portable name, for all names of a model, in their order."""
    gluon = list(names)
    mapped = {name: _from_gluon(name) for name in gluon}
    taken: dict[str, list[str]] = {}
    for name, portable in mapped.items():
        taken.setdefault(portable, []).append(name)
    # A block of one's own may have both "weight" and "gamma": those keep their names.
    return {name: portable if len(taken[portable]) == 1 else name for name, portable in mapped.items()}


def to_gluon(names: Iterable[str]) -> dict[str, str]:
    """Portable name -> Gluon name. `names` are the Gluon model's own: "weight" alone does not tell a gamma."""
    return {portable: gluon for gluon, portable in from_gluon(names).items()}


def _from_gluon(name: str) -> str:
    for pattern, replacement in GLUON:
        renamed, count = pattern.subn(replacement, name)
        if count:
            return renamed
    return name


def strip_prefix(arrays: Mapping[str, Array], expected: Iterable[str] = ()) -> dict[str, Array]:
    """Without the wrappers' prefixes that every name has, unless the model's own names (`expected`) have them too."""
    stripped, own = dict(arrays), set(expected)
    while stripped and not own.intersection(stripped):
        wrapper = next((each for each in WRAPPERS if all(name.startswith(each) for name in stripped)), None)
        if wrapper is None:
            break
        stripped = {name[len(wrapper) :]: array for name, array in stripped.items()}
    return stripped


def fit(arrays: Mapping[str, Array], expected: Mapping[str, Spec], what: str = "the model") -> dict[str, Array]:
    """The arrays for exactly the names in `expected`, in that order; CheckpointError when they do not fit."""
    found = strip_prefix(arrays, expected)
    for ending, default in ONLY_SOME.items():
        for name in [name for name in found if _ends(name, ending) and name not in expected]:
            del found[name]
        # Only where the layer itself is there: else the missing layer would be hidden.
        for name in [name for name in expected if _ends(name, ending) and name not in found]:
            if any(other.startswith(name[: -len(ending)]) for other in found):
                found[name] = default.copy()
    compare(expected, found, what)
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
        f"{len(shapes)} of another shape, {len(kinds)} of another dtype. Nothing was changed.\n"
        + "\n".join(lines + more)
    )


def _ends(name: str, ending: str) -> bool:
    return name.rpartition(".")[2] == ending


def _kind(dtype: Any) -> str | None:
    """ "float", "int", "bool" or "complex", of numpy's, torch's ("torch.float32") and OneFlow's dtypes alike."""
    if dtype is None:
        return None
    text = getattr(dtype, "__name__", None) or str(dtype)  # MXNet says <class 'numpy.float32'>
    return next((kind for kind in ("complex", "float", "int", "bool") if kind in text), text)

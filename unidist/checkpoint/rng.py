"""The random generators of Python and numpy as arrays of fixed shape, so that ranks can gather them. Not pickled."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from unidist.checkpoint import expect
from unidist.errors import CheckpointError, UsageError

Array = np.ndarray[Any, Any]


def capture() -> dict[str, Array]:
    """The state of `random` and of `numpy.random`'s functions in this process."""
    _, words, gauss = random.getstate()
    state = np.random.get_state(legacy=False)
    if not isinstance(state, dict) or state["bit_generator"] != "MT19937":
        raise UsageError("numpy.random's global generator was replaced by another kind: save its state yourself")
    return {
        "python": np.array(words, np.uint32),
        "python_gauss": np.array([gauss is not None, gauss or 0.0], np.float64),
        "numpy": np.append(state["state"]["key"], np.uint32(state["state"]["pos"])).astype(np.uint32),
        "numpy_gauss": np.array([state["has_gauss"], state["gauss"]], np.float64),
    }


def restorer(arrays: Mapping[str, Array]) -> Callable[[], None]:
    """What makes both continue where `capture` was. All is checked here, and tried out on generators of no one."""
    words, gauss = {}, {}
    for name in ("python", "numpy"):
        words[name] = expect.array(f"the generator state {name!r}", arrays.get(name), np.uint32, (625,))
        if words[name][624] > 624 or not words[name][:624].any():  # numpy would read beyond its words, or draw zeros
            raise CheckpointError(f"the generator state {name!r} is damaged")
        has, value = expect.array(
            f"the generator state '{name}_gauss'", arrays.get(f"{name}_gauss"), np.float64, (2,)
        ).tolist()
        if has not in (0.0, 1.0) or not np.isfinite(value):
            raise CheckpointError(f"the generator state '{name}_gauss' is damaged: it is {[has, value]}")
        gauss[name] = value if has else None
    python = (3, tuple(words["python"].tolist()), gauss["python"])
    kept = gauss["numpy"]
    numpy = ("MT19937", words["numpy"][:624], int(words["numpy"][624]), int(kept is not None), kept or 0.0)
    try:
        random.Random().setstate(python)
        np.random.RandomState().set_state(numpy)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"the generator state is damaged: {error}") from error

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)

    return restore

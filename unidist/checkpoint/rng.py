"""The random generators of Python and numpy as arrays of fixed shape, so that ranks can gather them. Not pickled."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np

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


def restore(arrays: Mapping[str, Array]) -> None:
    """Continue where `capture` was. Both are checked before either is changed."""
    shapes = {"python": (625,), "python_gauss": (2,), "numpy": (625,), "numpy_gauss": (2,)}
    for name, shape in shapes.items():
        if name not in arrays or arrays[name].shape != shape:
            raise CheckpointError(f"the generator state {name!r} is missing or has not the shape {shape}")
    has, gauss = arrays["python_gauss"].tolist()
    python = (3, tuple(arrays["python"].tolist()), gauss if has else None)
    before = random.getstate()
    try:
        random.setstate(python)
        has, gauss = arrays["numpy_gauss"].tolist()
        np.random.set_state(("MT19937", arrays["numpy"][:624], int(arrays["numpy"][624]), int(has), gauss))
    except (ValueError, TypeError) as error:
        random.setstate(before)
        raise CheckpointError(f"the generator state is damaged: {error}") from error

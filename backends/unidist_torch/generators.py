"""The state of torch's random generators, in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from unidist.plugin import CheckpointError, expect


def read(device: torch.device) -> dict[str, np.ndarray]:
    states = {"torch": torch.get_rng_state().numpy()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device).numpy()
    return states


def load(arrays: Mapping[str, np.ndarray], device: torch.device) -> Callable[[], None]:
    """Checks these states, and returns what puts them in place."""
    setters: dict[str, Callable[[torch.Tensor], None]] = {"cpu": torch.set_rng_state}
    if device.type == "cuda":
        setters["cuda"] = lambda state: torch.cuda.set_rng_state(state, device)
    states: dict[str, torch.Tensor] = {}
    for kind in setters:
        name = "torch" if kind == "cpu" else kind
        if name in arrays or kind == "cpu":  # a run on the CPU may be gone on with on a GPU
            nobodys = torch.Generator(kind)
            what = f"the generator state {name!r}"
            expect.array(what, arrays.get(name), np.uint8, tuple(nobodys.get_state().shape))
            states[kind] = torch.from_numpy(np.array(arrays[name]))
            try:
                nobodys.set_state(states[kind])
            except RuntimeError as error:
                raise CheckpointError(f"{what} is damaged: {error}") from error

    def put() -> None:
        for kind, state in states.items():
            setters[kind](state)

    return put

"""What an optimizer would keep for a parameter, under its own settings or those of a file: a step with parameters that
nobody holds tells.

They are on torch's "meta" device, which has shapes and no memory. The few optimizers that read values, which are not
there, are tried on the device itself, one parameter at a time.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from unidist.plugin import CheckpointError

META = torch.device("meta")
# Settings that say which kernels compute an update, and do not change what it is.
KERNELS = {"capturable", "differentiable", "foreach", "fused"}


class Like(NamedTuple):
    """A tensor that an optimizer keeps."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def possible(optimizer: torch.optim.Optimizer) -> bool:
    """A step that is not torch's own may change what the optimizer holds beside its state."""
    return bool(type(optimizer).step.__module__.startswith("torch.optim."))


def check_settings(kind: type, current: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Refuse what the optimizer would refuse when it is made."""
    taken = inspect.signature(kind).parameters

    def refusal(settings: Mapping[str, Any]) -> Exception | None:
        try:
            kind([torch.nn.Parameter(torch.zeros(1, 1))], **{key: settings[key] for key in settings if key in taken})
        except Exception as error:
            return error
        return None

    error = refusal({**current, **new})
    if error is not None and refusal(current) is None:
        raise CheckpointError(f"{kind.__name__} refuses the optimizer's settings: {error}") from error


def kept(optimizer: Any, parameter: Any, current: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Like]:
    """The tensors that it keeps for this parameter with the settings `current`, which those in `new` override."""
    for device in (META, parameter.device):
        found = _after_a_step(optimizer, parameter, {**current, **new}, device)
        if isinstance(found, dict):
            return {
                key: Like(tuple(array.shape), array.dtype, parameter.device if array.device == META else array.device)
                for key, array in found.items()
                if isinstance(array, torch.Tensor)
            }
        if isinstance(_after_a_step(optimizer, parameter, current, device), dict):
            raise CheckpointError(f"the optimizer could not go on with its settings: {found}") from found
    return {}


def _after_a_step(optimizer: Any, parameter: Any, settings: Mapping[str, Any], device: Any) -> Any:
    """The state of a parameter like this one, or the error."""
    stand_in = torch.nn.Parameter(torch.zeros_like(parameter, device=device))
    stand_in.grad = torch.zeros_like(stand_in)
    group = {**settings, **{kernel: False for kernel in KERNELS if kernel in settings}, "params": [stand_in]}
    trial = object.__new__(type(optimizer))
    hooks: dict[str, Any] = {f"_optimizer_step_{when}_hooks": OrderedDict() for when in ("pre", "post")}
    vars(trial).update(vars(optimizer), **hooks, param_groups=[group], state=defaultdict(dict))
    try:
        type(optimizer).step(trial)
    except Exception as error:
        return error
    return dict(trial.state[stand_in])

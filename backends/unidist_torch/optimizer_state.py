"""What torch's optimizers remember, in checkpoints that other frameworks can read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from unidist.plugin import CheckpointError, check_range, expect
from unidist_torch import trial

# What unidist's checkpoints call an optimizer's tensors, so that another framework can read them.
PORTABLE = {"momentum_buffer": "velocity", "exp_avg": "first_moment", "exp_avg_sq": "second_moment"}
NATIVE = {portable: key for key, portable in PORTABLE.items()}


def read(model: Any, optimizer: Any, scaler: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors by `parameter/name`, and plain values."""
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[f"{name}/{PORTABLE.get(key, key)}"] = value
            elif value is not None:
                values.setdefault("state", {})[f"{name}/{key}"] = value
    values["kind"] = type(optimizer).__name__
    groups = optimizer.param_groups
    values["groups"] = [{k: _plain(v) for k, v in group.items() if k != "params"} for group in groups]
    if scaler is not None:
        values["scaler"] = scaler.state_dict()
    return tensors, values


def load(
    model: Any,
    optimizer: Any,
    arrays: Mapping[str, np.ndarray],
    values: Mapping[str, Any],
    with_settings: bool,
    scaler: Any,
    device: torch.device,
) -> Callable[[], None]:
    """Check and try out everything, and return a function that puts it in place."""
    groups = expect.optimizer(values, type(optimizer).__name__, len(optimizer.param_groups))
    parameters = dict(model.named_parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    plain: dict[str, dict[str, Any]] = {}
    for name, value in expect.mapping("the optimizer's state", values.get("state", {})).items():
        owner, _, key = name.rpartition("/")
        if owner not in parameters or not isinstance(value, (bool, int, float, str)):
            raise expect.refuse(f"the optimizer's {name}", value, "a plain value of a parameter")
        plain.setdefault(owner, {})[key] = value
    current = [{k: _plain(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    settings: list[dict[str, Any]] = [{} for _ in current]
    if with_settings:
        pairs = enumerate(zip(groups, current, strict=True))
        settings = [expect.settings(f"the optimizer's group {n}", *pair, trial.KERNELS) for n, pair in pairs]
    known = trial.possible(optimizer)
    slots = expect.slots(arrays, shapes, values["kind"], values.get("state", {}), alike=not known)
    state = {name: {NATIVE.get(slot, slot): array for slot, array in slots[name].items()} for name in slots}
    kept: dict[str, dict[str, trial.Like]] = {}
    if known:
        names = {id(parameter): name for name, parameter in parameters.items()}
        for group, mine, saved in zip(optimizer.param_groups, current, settings, strict=True):
            trial.check_settings(type(optimizer), mine, saved)
            for parameter in group["params"]:
                name = names[id(parameter)]
                if name in state or name in plain:  # else it has not been updated yet
                    kept[name] = trial.kept(optimizer, parameter, mine, saved)
                    _check_kept(name, state.get(name, {}), plain.get(name, {}), kept[name])
    scale = _checked_scale(values["scaler"], scaler.state_dict()) if scaler and "scaler" in values else None

    def put() -> None:
        optimizer.state.clear()
        for name in {**state, **plain}:
            arrays, likes = state.get(name, {}), kept.get(name, {})
            tensors = {key: _slot(key, array, likes.get(key), device) for key, array in arrays.items()}
            optimizer.state[parameters[name]] = tensors | plain.get(name, {})
        for group, saved in zip(optimizer.param_groups, settings, strict=True):
            for key, value in saved.items():
                if isinstance(group[key], torch.Tensor):
                    group[key].fill_(value)  # a graph, or the user, may hold it
                else:
                    group[key] = value
        if scale:
            scaler.load_state_dict(scale)

    return put


def _slot(key: str, array: np.ndarray, like: trial.Like | None, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(np.array(array))
    if like is not None:
        return tensor.reshape(like.shape).to(like.device, like.dtype)
    if key == "step":  # a count stays on the host, where torch's optimizers look for it
        return tensor.reshape(()).float()
    return tensor.to(device if tensor.ndim or key in PORTABLE else "cpu")


def _plain(setting: Any) -> Any:
    """A rate may be a tensor."""
    return setting.item() if isinstance(setting, torch.Tensor) and setting.numel() == 1 else setting


def _check_kept(
    name: str, state: Mapping[str, np.ndarray], plain: Mapping[str, Any], kept: Mapping[str, trial.Like]
) -> None:
    """Whether this is the state of a parameter for which an optimizer keeps those tensors."""
    for key, like in kept.items():
        what = f"the optimizer's {name}/{PORTABLE.get(key, key)}"
        if key in plain or key not in state:
            raise CheckpointError(f"{what} is {'no array' if key in plain else 'missing'}")
        if state[key].shape != like.shape and key != "step":  # others keep that in an array of one
            raise CheckpointError(f"{what} is {state[key].shape}, it must be {like.shape}")
        if (state[key].dtype.kind == "f") != like.dtype.is_floating_point:
            raise CheckpointError(f"{what} is {state[key].dtype}, it must be {like.dtype}")
        check_range(what, state[key], like.dtype)


def _checked_scale(saved: object, current: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a GradScaler, which must have all that it has here, as numbers."""
    held = expect.mapping("the scale of gradients", saved)
    if held.keys() != current.keys():
        raise expect.refuse("the scale of gradients", sorted(held), f"made of {', '.join(current)}")
    for key, value in held.items():
        (expect.whole if isinstance(current[key], int) else expect.number)(f"the scale of gradients' {key}", value, 0)
    return held

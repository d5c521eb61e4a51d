"""The state of an optimizer as a checkpoint holds it, under names that other frameworks read too.

A tensor is called after its parameter and what it is: "0.weight/velocity". The velocity is written in float64 and
without the rate that MXNet keeps inside: so it means the same everywhere, and comes back to the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import nd

from unidist.errors import CheckpointError
from unidist_mxnet.optimizers import FusedAdam, FusedSGD, set_rate

MOMENTS = ("first_moment", "second_moment")


def saved_state(updater: mx.optimizer.Updater, names: list[str]) -> tuple[dict[str, nd.NDArray], dict[str, Any]]:
    """Tensors and plain values. What has not been updated yet has no state."""
    optimizer, tensors = updater.optimizer, {}
    counts = {name: optimizer._index_update_count.get(n, 0) for n, name in enumerate(names)}
    rates = {}
    for n, name in enumerate(names):
        state = updater.states.get(n)
        if isinstance(optimizer, FusedSGD):
            if state is not None:
                rates[name] = optimizer.rates.get(n, 1.0)
                tensors[f"{name}/velocity"] = state.astype("float64") / -rates[name]
        elif isinstance(optimizer, FusedAdam):
            if state is not None:
                tensors.update({f"{name}/{kind}": array for kind, array in zip(MOMENTS, state, strict=True)})
                tensors[f"{name}/step"] = nd.array([counts[name]], dtype="float32")  # as torch has it
        else:
            tensors.update({f"{name}/state{i}": array for i, array in enumerate(_leaves(state))})
    values = {"kind": _kind(optimizer), "counts": counts, "rates": rates, "updates": optimizer.num_update}
    if isinstance(optimizer, mx.optimizer.Nadam):
        values["m_schedule"] = optimizer.m_schedule
    # One group, as other frameworks have it that allow several.
    return tensors, {**values, "groups": [{"lr": optimizer.learning_rate, "weight_decay": optimizer.wd}]}


def restore_state(
    updater: mx.optimizer.Updater,
    names: list[str],
    weights: list[nd.NDArray],
    arrays: Mapping[str, np.ndarray],
    values: Mapping[str, Any],
) -> None:
    optimizer = updater.optimizer
    updater.states, updater.states_synced = {}, {}
    optimizer._set_current_context(weights[0].context.device_id)
    optimizer._index_update_count.clear()
    for n, (name, weight) in enumerate(zip(names, weights, strict=True)):
        own = {key.rpartition("/")[2]: array for key, array in arrays.items() if key.rpartition("/")[0] == name}
        count = int(values.get("counts", {}).get(name, 0)) or int(np.ravel(own.get("step", [0]))[0])
        if not own and not count:
            continue
        updater.states[n] = state = optimizer.create_state_multi_precision(n, weight)
        updater.states_synced[n] = True
        optimizer._index_update_count[n] = count
        if isinstance(optimizer, FusedSGD) and state is not None:
            rate = values.get("rates", {}).get(name, 1.0)
            optimizer.rates[n] = rate
            if "velocity" in own:  # else there was no momentum yet
                _fill(state, own["velocity"].astype(np.float64) * -rate)
        elif isinstance(optimizer, FusedAdam):
            for array, kind in zip(state, MOMENTS, strict=True):
                _fill(array, own[kind])
        else:
            for i, array in enumerate(_leaves(state)):
                if f"state{i}" not in own:
                    raise CheckpointError(f"the checkpoint has no {name}/state{i}: it is of another optimizer")
                _fill(array, own[f"state{i}"])
    if isinstance(optimizer, mx.optimizer.Nadam):
        optimizer.m_schedule = float(values.get("m_schedule", 1.0))
    if not isinstance(optimizer, (FusedSGD, FusedAdam)) and optimizer.lr_scheduler is None:
        set_rate(optimizer, values["groups"][0]["lr"])  # it may have been set by hand; a spec says its own
    optimizer.num_update = int(values.get("updates", max(optimizer._index_update_count.values(), default=0)))


def _kind(optimizer: mx.optimizer.Optimizer) -> str:
    if isinstance(optimizer, FusedAdam):
        return "AdamW" if optimizer.decoupled else "Adam"
    return "SGD" if isinstance(optimizer, FusedSGD) else f"mx.optimizer.{type(optimizer).__name__}"


def _fill(array: nd.NDArray, values: np.ndarray) -> None:
    array[:] = nd.array(values.astype(array.dtype), dtype=array.dtype)


def _leaves(state: Any) -> list[nd.NDArray]:
    if isinstance(state, nd.NDArray):
        return [state]
    return [leaf for each in state for leaf in _leaves(each)] if isinstance(state, (list, tuple)) else []

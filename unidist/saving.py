"""Checkpoints of a job: who gathers, who writes, who waits, and what happens to everyone when it fails."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from unidist.checkpoint import fit, read, write
from unidist.checkpoint.rng import capture, restore
from unidist.errors import CheckpointError, PeerFailed, UsageError

if TYPE_CHECKING:
    from unidist.backend import Backend
    from unidist.collectives import Collectives
    from unidist.training import Schedule

Array = np.ndarray[Any, Any]
RESERVED = ("unidist",)


def save(
    path: str | os.PathLike[str],
    backend: Backend,
    collectives: Collectives,
    *,
    model: Any,
    optimizer: Any,
    schedule: Schedule | None,
    loader: Any,
    keep: int | None,
    values: Mapping[str, Any],
) -> None:
    """Every rank calls it; rank 0 writes, all wait, and a failure to write is raised on every rank."""
    for name in RESERVED:
        if name in values:
            raise UsageError(f"a value of one's own cannot be called {name!r}")
    if keep is not None and schedule is None:
        raise UsageError("keep= numbers checkpoints by the updates made: pass optimizer= too")
    own: dict[str, Any] = {"world_size": backend.world.world_size}
    arrays: dict[str, Array] = {}
    if model is not None:
        arrays |= {f"model/{name}": backend.to_numpy(tensor) for name, tensor in backend.state(model).items()}
    if optimizer is not None and schedule is not None:
        tensors, own["optimizer"] = backend.optimizer_state(model, optimizer)
        arrays |= {f"optimizer/{name}": backend.to_numpy(tensor) for name, tensor in tensors.items()}
        own["updates"] = schedule.updates
    if loader is not None:
        own["loader"] = loader.state()
    # Each rank draws its own dropout: all of the generators are kept.
    for rank, states in enumerate(collectives.all_gather({**capture(), **backend.rng_state()})):
        arrays |= {f"rng/{rank}/{name}": state for name, state in states.items()}
    error: Exception | None = None
    if backend.world.rank == 0:
        try:
            step = schedule.updates if keep is not None and schedule is not None else None
            write(path, arrays, {**values, "unidist": own}, step=step, keep=keep)
        except Exception as raised:
            error = raised
    failed = collectives.all_reduce(int(error is not None), "max")
    if error is not None:
        raise error
    if failed:
        raise PeerFailed(f"rank 0 could not save to {os.fspath(path)}: see its error")


def load(
    path: str | os.PathLike[str],
    backend: Backend,
    *,
    model: Any,
    optimizer: Any,
    schedule: Schedule | None,
    loader: Any,
) -> dict[str, Any]:
    """Everything is read and checked before anything in memory changes. Returns the user's own values."""
    found = read(path)
    own = found.values.get("unidist", {})
    if model is not None:
        weights = fit(found.section("model"), _shapes(backend.state(model)), "the model")
    if optimizer is not None and schedule is not None:
        if "updates" not in own:
            raise CheckpointError(f"{found.path} holds no optimizer: load it without optimizer=")
        _check_kind(own["optimizer"], backend.optimizer_state(model, optimizer)[1], found.path)
        moments = found.section("optimizer")
        _check_moments(moments, _shapes(backend.state(model)), found.path)
    if loader is not None:
        if "loader" not in own:
            raise CheckpointError(f"{found.path} holds no position of a loader: load it without loader=")
        loader.load_state(own["loader"])  # checks first
    if model is not None:
        backend.load_state(model, weights)
    if optimizer is not None and schedule is not None:
        backend.load_optimizer_state(model, optimizer, moments, own["optimizer"])
        schedule.updates = int(own["updates"])
    generators = found.section(f"rng/{backend.world.rank}")
    # On another number of ranks there is no generator for each: they keep what they have.
    if generators and own.get("world_size") == backend.world.world_size:
        restore(generators)
        backend.load_rng_state(generators)
    return {name: value for name, value in found.values.items() if name not in RESERVED}


def _check_kind(saved: Mapping[str, Any], here: Mapping[str, Any], path: object) -> None:
    if "kind" in saved and "kind" in here and saved["kind"] != here["kind"]:
        raise CheckpointError(
            f"{path} was saved with the optimizer {saved['kind']}, here it is {here['kind']}. Nothing was changed."
        )
    if len(saved.get("groups", ())) != len(here.get("groups", ())):
        raise CheckpointError(
            f"the optimizer in {path} has {len(saved.get('groups', ()))} parameter groups, here it has "
            f"{len(here.get('groups', ()))}. Nothing was changed."
        )


def _check_moments(moments: Mapping[str, Array], expected: Mapping[str, Any], path: object) -> None:
    """Each belongs to a parameter and has its shape, or is one number. A new optimizer holds none to compare with."""
    for name, array in moments.items():
        parameter, _, kind = name.rpartition("/")
        if parameter not in expected or (array.size != 1 and array.shape != expected[parameter][0]):
            raise CheckpointError(
                f"the optimizer in {path} is of another model: {kind} of {parameter} {array.shape} does not fit. "
                "Nothing was changed."
            )


def _shapes(tensors: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], Any]]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}

"""Checkpoints of a job: rank 0 converts and writes; every rank reads, and none changes anything before all have agreed.

Errors reach every rank with the rank and host they are from, and as one type (see `agreement`): a loop that catches
`CheckpointError` does so everywhere or nowhere.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from unidist.checkpoint import expect, reader
from unidist.checkpoint.agreement import Agreement, Gather
from unidist.checkpoint.layout import place
from unidist.checkpoint.names import fit, strip_prefix
from unidist.checkpoint.reader import Checkpoint
from unidist.checkpoint.rng import capture, restorer
from unidist.checkpoint.writer import write
from unidist.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from unidist.backend import Backend
    from unidist.collectives import Collectives
    from unidist.training.accumulation import Schedule

Array = np.ndarray[Any, Any]
Put = Callable[[], None]  # changes something in memory; everything has been checked

RESERVED = "unidist"  # the value that holds what is not the user's
READINGS = 5  # of a checkpoint that another process replaces each time between one rank's reading and another's


@dataclass(frozen=True)
class Parts:
    """What is saved or loaded; each may be None."""

    model: Any
    optimizer: Any
    schedule: Schedule | None  # of the optimizer
    loader: Any
    schedules: Sequence[Schedule] = ()  # of all optimizers that the model was prepared with

    def __post_init__(self) -> None:
        for method in ("state", "load_state"):
            if self.loader is not None and not callable(getattr(self.loader, method, None)):
                kind = type(self.loader).__name__
                raise UsageError(f"loader= takes what strategy.loader() returned, not an object of type {kind}")

    def __str__(self) -> str:
        """In words that are the same where the parts are."""
        named = {"model": self.model, "optimizer": self.optimizer, "loader": self.loader}
        words = [f"{name} ({type(parameter).__name__})" for name, parameter in named.items() if parameter is not None]
        numbers = [str(schedule.number) for schedule in ([self.schedule] if self.schedule else self.schedules)]
        return " and ".join(words or ["nothing"]) + (f" of prepare() number {', '.join(numbers)}" if numbers else "")


def save(
    path: str | os.PathLike[str],
    backend: Backend,
    collectives: Collectives,
    gather: Gather,
    ask: Callable[[], Parts],
    compare: Callable[[Any], None],
    *,
    keep: int | None,
    values: Mapping[str, Any],
) -> None:
    """Every rank calls it. Rank 0 alone copies to the host and writes; all wait, and a failure is raised on all.

    `gather` gives what each rank has said, without the engine; `ask` gives the parts, or raises where they cannot be
    saved; `compare(model)` raises unless all ranks hold the same.
    """
    world = backend.world
    agreement = Agreement(gather, world.rank, f"save to {str(path) or repr('')}")

    def wanted() -> tuple[Parts, str]:
        place(path)  # only that of rank 0 is written to
        parts = ask()
        if RESERVED in values:
            raise UsageError(f"a value of one's own cannot be called {RESERVED!r}")
        if keep is not None and parts.schedule is None:
            raise UsageError("keep= numbers checkpoints by the updates made: pass optimizer= too")
        return parts, f"it asks to save {parts}, with keep={keep!r}"

    def state() -> tuple[dict[str, Any], dict[str, Any], dict[str, Array]]:
        record: dict[str, Any] = {"world_size": world.world_size, "framework": backend.framework}
        tensors: dict[str, Any] = {}
        if parts.optimizer is not None and parts.schedule is not None:
            # First: where servers hold the parameters and others may still be sending, this waits for them.
            moments, record["optimizer"] = backend.optimizer_state(parts.model, parts.optimizer)
            tensors |= {f"optimizer/{name}": tensor for name, tensor in moments.items()}
            record["updates"], record["optimizer_arrays"] = parts.schedule.updates, len(moments)
        if parts.model is not None:
            tensors |= {f"model/{name}": tensor for name, tensor in backend.state(parts.model).items()}
        if parts.loader is not None:
            record["loader"] = parts.loader.state()
        return record, tensors, {**capture(), **backend.rng_state()}

    def written() -> None:
        if world.rank == 0:
            arrays = {name: backend.to_numpy(tensor) for name, tensor in tensors.items()}
            for rank, states in enumerate(everyones):
                arrays |= {f"rng/{rank}/{name}": state for name, state in states.items()}
            step = parts.schedule.updates if keep is not None and parts.schedule is not None else None
            write(path, arrays, {**values, RESERVED: record}, step=step, keep=keep)

    parts = agreement.on(wanted)
    compare(parts.model)
    (record, tensors, generators), _ = agreement.each(state)
    everyones = collectives.all_gather(generators)  # each rank draws its own dropout: all of the generators are kept
    agreement.each(written)


def load(
    path: str | os.PathLike[str],
    backend: Backend,
    gather: Gather,
    ask: Callable[[], Parts],
    *,
    generators: bool | None,
) -> dict[str, Any]:
    """Every rank calls it, reads, checks and tries out everything; then all agree, and only then anything changes.

    Random generators belong to a run that goes on: with `generators` None they come with an optimizer or a loader.
    Returns the user's own values.
    """
    agreement = Agreement(gather, backend.world.rank, f"load {str(path) or repr('')}")

    def wanted() -> tuple[Parts, str]:
        place(path)  # which may be another on each rank, as long as the same is there
        parts = ask()
        return parts, f"it asks to load {parts}, with generators={generators!r}"

    def checked() -> tuple[Checkpoint, list[Put]]:
        shapes = _shapes(backend.state(parts.model)) if parts.model is not None else {}
        found = reader.read(path, only=[name for name, asked in sections.items() if asked], missing_ok=True)
        puts = _checked(found, backend, parts, shapes)
        if with_generators:
            puts += _generators(found, backend, required=generators is True)
        return found, puts

    parts = agreement.on(wanted)
    resumes = parts.optimizer is not None or parts.loader is not None
    with_generators = resumes if generators is None else generators
    sections = {"model": parts.model is not None, "optimizer": parts.optimizer is not None, "rng": with_generators}
    for _ in range(READINGS):
        (found, puts), same = agreement.each(checked, lambda checked: checked[0].sha256)
        if same:
            for put in puts:
                put()
            return {name: value for name, value in found.values.items() if name != RESERVED}
    raise CheckpointError(
        f"cannot load {path!s}: the ranks do not read the same there. Another process saves all the time, or the "
        "ranks' hosts do not share this folder: give them one copy. Nothing was changed on any rank."
    )


def _checked(found: Checkpoint, backend: Backend, parts: Parts, shapes: Mapping[str, Any]) -> list[Put]:
    """Functions that put each part in its place, once all of them have been found good."""
    record = _record(found)
    puts: list[Put] = []
    if parts.model is not None:
        given = found.section("model")
        weights = fit(given, shapes, "the model")
        backend.check_state(parts.model, weights, weights.keys() - strip_prefix(given, shapes).keys())
        puts.append(lambda: backend.load_state(parts.model, weights))
    schedule = parts.schedule
    if parts.optimizer is not None and schedule is not None:
        if "updates" not in record:
            raise CheckpointError("it holds no optimizer: load it without optimizer=")
        updates = expect.whole("the number of updates", record["updates"])
        state = expect.mapping("the optimizer", record.get("optimizer"))
        moments = found.section("optimizer")
        if len(moments) != expect.whole("the number of arrays", record.get("optimizer_arrays", len(moments))):
            raise CheckpointError(f"it holds {len(moments)} of the optimizer's {record['optimizer_arrays']} arrays")
        puts.append(backend.load_optimizer_state(parts.model, parts.optimizer, moments, state))
        puts.append(lambda: setattr(schedule, "updates", updates))
    if parts.loader is not None:
        if "loader" not in record:
            raise CheckpointError("it holds no position of a loader: load it without loader=")
        place = expect.mapping("the loader's position", record["loader"])
        for key in ("epoch", "samples", *(key for key in ("size", "parts") if key in place)):
            expect.whole(f"the loader's {key}", place.get(key))
        if place["samples"] > place.get("size", expect.LARGEST):
            raise CheckpointError(f"the loader's position is sample {place['samples']} of {place['size']}")
        copy.copy(parts.loader).load_state(place)  # it only sets attributes of its own: tried out on a copy
        puts.append(lambda: parts.loader.load_state(place))
    return puts


def _record(found: Checkpoint) -> dict[str, Any]:
    return expect.mapping("the part that unidist wrote", found.values.get(RESERVED, {}))


def _generators(found: Checkpoint, backend: Backend, required: bool) -> list[Put]:
    saved, here = expect.whole("the number of ranks", _record(found).get("world_size"), 1), backend.world.world_size
    if saved != here:  # there is no generator for each rank: they keep what they have
        if required:
            raise CheckpointError(f"it holds the generators of {saved} ranks, here are {here}: leave out generators=")
        return []
    states = found.section(f"rng/{backend.world.rank}")
    puts: list[Put] = [restorer(states)]
    framework = expect.text("the framework", _record(found).get("framework", ""))  # which older checkpoints do not say
    if required or framework == backend.framework or (not framework and backend.framework in states):
        # The dropout of another framework cannot be continued.
        puts.append(backend.load_rng_state(states))
    return puts


def _shapes(tensors: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], Any]]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}

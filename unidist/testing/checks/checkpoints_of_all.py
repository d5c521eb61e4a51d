"""Promise 8, of all ranks together: one writes, all read, and what one of them cannot do changes nothing on any."""

from __future__ import annotations

import os
import shutil
import socket
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from unidist.checkpoint import read, reader, write
from unidist.checkpoint.rng import capture
from unidist.errors import CheckpointError
from unidist.optim import SGD
from unidist.testing import reference
from unidist.testing.case import Case, check, close, refused
from unidist.testing.checks.checkpoints import Run, settled


@check
def failure_to_write_reaches_every_rank(case: Case) -> None:
    model = case.strategy.prepare(case.mlp())
    blocked = case.folder / "a-file"
    with case.strategy.main_first():
        if case.rank == 0:
            Path(blocked).write_text("in the way")
    with refused(CheckpointError, "a-file", "Not a directory", *(() if case.size == 1 else ("on rank 0 (host ",))):
        case.strategy.save(blocked / "below", model=model)
    assert case.strategy.all_reduce(1, "sum") == case.size  # and the job can go on


@check
def only_rank_0_copies_to_the_host(case: Case) -> None:
    """Nobody else has a use for a second copy of the model. (To see that all hold the same, each rank looks at one
    parameter after the other.)"""
    arguments: dict[str, Any] = {"model": case.strategy.prepare(case.mlp())}
    if case.strategy.capabilities.optimizer_state is True:
        model, optimizer = case.strategy.prepare(case.mlp(), SGD(0.1, momentum=0.9))
        step = case.strategy.train_step(model, optimizer, case.zoo.cross_entropy)
        for x, y in case.strategy.loader(reference.data(4 * case.backend.devices * case.size), per_device_batch=4):
            step(x, y)
        arguments = {"model": model, "optimizer": optimizer}
    copied: list[weakref.ref[Any]] = []
    most = 0
    to_numpy = case.backend.to_numpy

    def spy(tensor: Any) -> Any:
        nonlocal most
        array = to_numpy(tensor)
        if array.shape in matrices:
            copied.append(weakref.ref(array))
        most = max(most, sum(reference() is not None for reference in copied))
        return array

    matrices = [array.shape for array in reference.weights() if array.ndim == 2]

    case.backend.to_numpy = spy
    try:
        case.strategy.save(case.folder / "by-rank-0", **arguments)
    finally:
        del case.backend.to_numpy
    assert most == len(arguments) * len(matrices) if case.rank == 0 else most <= 1, f"{most} were held at a time"


@check
def rank_that_cannot_read_stops_them_all(case: Case) -> None:
    """What one rank finds damaged, or cannot see, changes nothing on any, and each of them says who it was and why."""
    last = case.size - 1
    run = Run(case, SGD(0.1)).train(1)
    parts = run.parts if case.strategy.capabilities.optimizer_state is True else {"model": run.model}
    place, mine = case.folder / "read", case.folder / f"read-{case.rank}"
    case.strategy.save(place, **parts)
    expected = settled(case, run.model)
    for damage, words in (("truncated", "truncated"), ("missing", "is missing"), ("gone", "no checkpoint")):
        if damage != "gone" or case.rank != last:
            shutil.copytree(place, mine, dirs_exist_ok=True)
        if case.rank == last and damage != "gone":
            (file,) = mine.glob("model-*")
            os.truncate(file, 50) if damage == "truncated" else file.unlink()
        other = Run(case, SGD(0.1))
        theirs = {key: getattr(other, key) for key in parts}
        before = [case.parameters(other.model), capture()["numpy"].tolist(), other.loader.state()]
        where = f"on rank {last} (host {socket.gethostname()}" if case.size > 1 else str(mine)
        with refused(CheckpointError, words, where, f"read-{last}", "Nothing was changed on any rank"):
            case.strategy.load(mine, **theirs)
        close(case.parameters(other.model), before[0], tolerance=0)
        assert [capture()["numpy"].tolist(), other.loader.state()] == before[1:]
        if mine.exists():
            shutil.rmtree(mine)
        case.strategy.barrier()
        case.strategy.load(place, **theirs)  # the ranks are still together
        close(case.parameters(other.model), expected, tolerance=0)


@check
def ranks_that_read_different_checkpoints_are_told(case: Case) -> None:
    """As when their hosts do not share the folder: each has one, of another time."""
    model = case.strategy.prepare(case.mlp())
    for version in (1, 2):
        case.strategy.save(case.folder / f"version-{version}", model=model, version=version)
    mine = case.folder / f"version-{1 if case.rank == 0 else 2}"
    if case.size == 1:
        assert case.strategy.load(mine, model=model) == {"version": 1}
        return
    with refused(CheckpointError, "do not read the same", "share"):
        case.strategy.load(mine, model=model)


@check
def ranks_that_read_while_another_process_saves_agree(case: Case) -> None:
    """The last rank reads the old checkpoint and the others the new one: they read again, and all have the new one."""
    model = case.strategy.prepare(case.mlp(seed=7))
    for version in (1, 2):
        case.strategy.save(case.folder / f"saved-{version}", model=model, version=version)
    readings: list[Path] = []

    def late(path: Any, **how: Any) -> Any:
        readings.append(Path(path))
        old = len(readings) == 1 and case.rank == case.size - 1 > 0
        return read(case.folder / "saved-1" if old else path, **how)

    reader.read = late
    try:
        values = case.strategy.load(case.folder / "saved-2", model=model)
    finally:
        reader.read = read
    assert values == {"version": 2}
    assert len(readings) == (1 if case.size == 1 else 2)


@check
def damaged_generators_change_nothing(case: Case) -> None:
    """Nor do they after the weights were found good: all is tried out first, and then put in place."""
    run = Run(case, SGD(0.1)).train(1)
    parts = run.parts if case.strategy.capabilities.optimizer_state is True else {"model": run.model}
    place = case.folder / "generators"
    case.strategy.save(place, **parts)
    saved = settled(case, run.model)
    names = [name for name in read(place).arrays if name.startswith(f"rng/{case.size - 1}/")]
    for name in names:
        with case.strategy.main_first():
            if case.rank == 0:
                found = read(place)
                write(place, found.arrays | {name: found.arrays[name][:-1]}, found.values)
        other = Run(case, SGD(0.1)).train(2)
        before = settled(case, other.model)
        state, kept = other.loader.state(), capture()["numpy"].tolist()
        theirs = {key: getattr(other, key) for key in parts}
        with refused(CheckpointError, "generator state", name.rpartition("/")[2], str(place)):
            case.strategy.load(place, **theirs, generators=True)
        close(case.parameters(other.model), before, tolerance=0)
        assert other.loader.state() == state
        assert capture()["numpy"].tolist() == kept
        case.strategy.load(place, **theirs, generators=False)
        close(case.parameters(other.model), saved, tolerance=0)
        with case.strategy.main_first():
            if case.rank == 0:
                write(place, found.arrays, found.values)


@check
def values_that_do_not_fit_the_dtype_are_refused(case: Case) -> None:
    """1e300 is no float32: neither as a weight nor in the optimizer, where it would become infinite."""
    run = Run(case, SGD(0.1, momentum=0.9)).train(1)
    whole = case.strategy.capabilities.optimizer_state is True
    parts = run.parts if whole else {"model": run.model}
    place = case.folder / "range"
    case.strategy.save(place, **parts)
    found, before = read(place), settled(case, run.model)
    for section in ("model/", "optimizer/")[: 1 + whole]:
        name = next(name for name in found.arrays if name.startswith(section))
        with case.strategy.main_first():
            if case.rank == 0:
                huge = np.full(found.arrays[name].shape, 1e300)
                write(case.folder / "out-of-range", found.arrays | {name: huge}, found.values)
        with refused(CheckpointError, name.partition("/")[2], "float32 cannot hold"):
            case.strategy.load(case.folder / "out-of-range", **parts)
        close(settled(case, run.model), before, tolerance=0)


@check
def generators_that_are_not_there_are_missed(case: Case) -> None:
    """Those of the framework, from which dropout draws: in a checkpoint of the same one, or where they are asked for.
    A checkpoint of another framework has none of them, and serves all the same."""
    model = case.strategy.prepare(case.mlp())
    loader = case.strategy.loader(reference.data(24), per_device_batch=2)
    case.strategy.save(case.folder / "drawn", model=model, loader=loader)
    lacking = case.folder / "lacking"
    for framework in (case.strategy.framework, "another"):
        with case.strategy.main_first():
            if case.rank == 0:
                found = read(case.folder / "drawn")
                left = {
                    name: array for name, array in found.arrays.items() if not name.endswith(case.strategy.framework)
                }
                assert len(found.arrays) - len(left) == case.size
                write(lacking, left, found.values | {"unidist": found.values["unidist"] | {"framework": framework}})
        with refused(CheckpointError, "generator state", case.strategy.framework, "missing"):
            case.strategy.load(lacking, model=model, generators=True)
        case.strategy.load(lacking, model=model)
        case.strategy.load(lacking, model=model, loader=loader, generators=False)
        if framework == "another":
            case.strategy.load(lacking, model=model, loader=loader)
        else:
            with refused(CheckpointError, "generator state", framework, "missing"):
                case.strategy.load(lacking, model=model, loader=loader)

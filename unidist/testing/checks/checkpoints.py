"""Promise 8: checkpoints that resume the same curve, and refuse what does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from unidist.checkpoint import read, write
from unidist.errors import CheckpointError, StateError, UsageError
from unidist.optim import SGD, Adam, AdamW, OptimizerSpec
from unidist.testing import reference
from unidist.testing.case import Case, check, close, refused

SPECS: tuple[OptimizerSpec, ...] = (
    SGD(lambda update: 0.5 / (1 + update), momentum=0.9),
    Adam(0.02),
    AdamW(lambda update: 0.02 * 0.95**update, weight_decay=0.1),
)


class Run:
    """A training run that can be stopped anywhere."""

    def __init__(self, case: Case, spec: OptimizerSpec) -> None:
        self._strategy = case.strategy
        self.model, self.optimizer = case.strategy.prepare(case.mlp(), spec)
        self._step = case.strategy.train_step(self.model, self.optimizer, case.zoo.cross_entropy)
        samples = 4 * case.backend.devices * case.size * 3 + case.size + 1
        self.loader = case.strategy.loader(reference.data(samples), per_device_batch=4, shuffle=True, seed=3)
        self.losses: list[float] = []

    def train(self, steps: int, saving: Mapping[int, Path] | None = None) -> Run:
        """`saving`: where to, after which steps, without leaving the pass."""
        done = 0
        while done < steps:
            for x, y in self.loader:
                self.losses.append(self._strategy.mean(self._step(x, y)))
                done += 1
                if saving and done in saving:
                    self.save(saving[done], done)
                if done == steps:
                    break
        return self

    def save(self, place: Path, stop: int) -> None:
        self._strategy.save(place, **self.parts, note={"stop": stop, "best": [0.5, None]})

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "loader": self.loader}


def settled(case: Case, model: Any) -> list[Any]:
    """The parameters, when nobody moves them any more: where ranks are not in step, another may still do."""
    with case.strategy.evaluate(model):
        return [parameter.copy() for parameter in case.parameters(model)]


@check
def resumed_run_goes_on_as_if_nothing_had_happened(case: Case) -> None:
    """From the end of an epoch and from the middle of one, saved in passing or after a stop; to the last bit where sums
    of ranks are exact. A run can be resumed into new parts as well as into used ones."""
    case.requires("optimizer_state")
    tolerance = 0.0 if case.size <= 2 else 1e-6
    for number, spec in enumerate(SPECS):
        places = {stop: case.folder / f"run-{number}-{stop}" for stop in (3, 4, 6)}  # four steps make an epoch
        whole, stopped, resumed = (Run(case, spec) for _ in range(3))
        whole.train(10, saving={stop: places[stop] for stop in (3, 4)})
        stopped.train(6).save(places[6], 6)
        for stop, place in places.items():
            resumed.losses.clear()
            values = case.strategy.load(place, **resumed.parts)
            resumed.train(10 - stop)
            assert values == {"note": {"stop": stop, "best": [0.5, None]}}
            if case.strategy.capabilities.synchronous is not True and case.size > 1:
                continue
            close(stopped.losses, whole.losses[:6], tolerance)
            close(resumed.losses, whole.losses[stop:], tolerance)
            close(case.parameters(resumed.model), case.parameters(whole.model), tolerance)


@check
def run_begins_again_where_it_began(case: Case) -> None:
    """From a checkpoint of before the first update, into parts that have made some: nothing of these is left."""
    case.requires("optimizer_state", "synchronous")
    for number, spec in enumerate((SGD(lambda update: 0.1 * update, momentum=0.9), *SPECS)):  # one with a warm-up
        place = case.folder / f"beginning-{number}"
        run = Run(case, spec)
        run.save(place, 0)
        first, losses = case.parameters(run.train(4).model), list(run.losses)
        case.strategy.load(place, **run.parts)
        run.losses.clear()
        close(case.parameters(run.train(4).model), first, tolerance=0.0 if case.size <= 2 else 1e-6)
        close(run.losses, losses, tolerance=0.0 if case.size <= 2 else 1e-6)


@check
def optimizer_without_its_arrays_is_refused(case: Case) -> None:
    """It would begin anew, as if it had made no update."""
    case.requires("optimizer_state")
    for number, spec in enumerate(SPECS):
        place = case.folder / f"bare-{number}"
        run = Run(case, spec).train(2)
        run.save(place, 2)
        with case.strategy.main_first():
            if case.rank == 0:
                found = read(place)
                left = {name: array for name, array in found.arrays.items() if not name.startswith("optimizer/")}
                write(place, left, found.values)
        with refused(CheckpointError, "it holds 0 of the optimizer's"):
            case.strategy.load(place, **run.parts)


@check
def what_was_loaded_is_saved_again(case: Case) -> None:
    """To the last bit, whoever holds the parameters and the optimizer, and whether the ranks are in step or not."""
    case.requires("optimizer_state")
    for number, spec in enumerate(SPECS):
        first, second = (case.folder / f"again-{number}-{n}" for n in (1, 2))
        Run(case, spec).train(3).save(first, 3)
        other = Run(case, spec).train(1)
        case.strategy.load(first, **other.parts)
        other.save(second, 3)
        was, now = read(first), read(second)
        record = now.values["unidist"]
        assert record | {"optimizer": None} == was.values["unidist"] | {"optimizer": None}
        assert record["optimizer"]["kind"] == was.values["unidist"]["optimizer"]["kind"]
        assert was.arrays.keys() == now.arrays.keys()
        assert any(name.startswith("optimizer/") for name in was.arrays)
        for name in was.arrays:
            if not name.startswith("rng/"):  # those of a framework may be moved on by looking at them
                assert was.arrays[name].tobytes() == now.arrays[name].tobytes(), name


@check
def random_numbers_resume(case: Case) -> None:
    """Each rank's own, as dropout draws them: when a run goes on, not when a model is loaded by itself."""
    model = case.strategy.prepare(case.mlp())
    np.random.seed(case.rank)
    loader = case.strategy.loader(reference.data(8 * case.backend.devices * case.size), per_device_batch=4)
    case.strategy.save(case.folder / "random", model=model, loader=loader)
    expected, dropped = np.random.rand(3), case.zoo.draw()
    np.random.seed(99)
    drawn = np.random.RandomState(99).rand(3)
    case.strategy.load(case.folder / "random", model=model)  # a model by itself: the generators are left alone
    assert (np.random.rand(3) == drawn).all()
    assert not (case.zoo.draw() == dropped).any()
    for how in ({"generators": True}, {"loader": loader}):
        case.strategy.load(case.folder / "random", model=model, **how)
        assert (np.random.rand(3) == expected).all()
        assert (case.zoo.draw() == dropped).all()
    case.strategy.load(case.folder / "random", model=model, loader=loader, generators=False)
    assert not (case.zoo.draw() == dropped).any()


@check
def last_checkpoints_are_kept(case: Case) -> None:
    case.requires("optimizer_state")
    run = Run(case, SGD(0.1))
    folder = case.folder / "kept"
    for _ in range(4):
        case.strategy.save(folder, **run.train(1).parts, keep=2, losses=run.losses)
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["step-000003", "step-000004"]
    assert case.strategy.load(folder, **Run(case, SGD(0.1)).parts)["losses"] == run.losses


@check
def weights_alone(case: Case) -> None:
    """A checkpoint with everything serves a model alone, and its names are the framework-neutral ones."""
    model = case.strategy.prepare(case.mlp(seed=5))
    case.strategy.save(case.folder / "weights", model=model)
    other = case.strategy.prepare(case.mlp(seed=6))
    assert case.strategy.load(case.folder / "weights", model=other) == {}
    close(case.parameters(other), reference.weights(5), tolerance=0)
    if case.strategy.capabilities.optimizer_state is True:
        model, optimizer = case.strategy.prepare(case.mlp(), SGD(0.1))
        with refused(CheckpointError, "no optimizer"):
            case.strategy.load(case.folder / "weights", model=model, optimizer=optimizer)


@check
def checkpoint_of_another_model_changes_nothing(case: Case) -> None:
    model = case.strategy.prepare(case.zoo.with_buffers())
    case.strategy.save(case.folder / "other", model=model)
    mlp = case.strategy.prepare(case.mlp())
    with refused(CheckpointError, "does not fit", "unexpected"):
        case.strategy.load(case.folder / "other", model=mlp)
    close(case.parameters(mlp), reference.weights(), tolerance=0)
    with refused(CheckpointError, "nowhere"):
        case.strategy.load(case.folder / "nowhere", model=mlp)


@check
def position_of_another_order_is_refused(case: Case) -> None:
    model = case.strategy.prepare(case.mlp())
    data = reference.data(16)
    case.strategy.save(case.folder / "position", model=model, loader=case.strategy.loader(data, per_device_batch=2))
    for other in (
        case.strategy.loader(data, per_device_batch=2, shuffle=True),
        case.strategy.loader(reference.data(15), per_device_batch=2),
    ):
        with refused(CheckpointError, "another order"):
            case.strategy.load(case.folder / "position", model=model, loader=other)


@check
def checkpoint_of_another_optimizer_is_refused(case: Case) -> None:
    case.requires("optimizer_state")
    model, optimizer = case.strategy.prepare(case.mlp(), Adam(0.1))
    case.strategy.save(case.folder / "adam", model=model, optimizer=optimizer)
    model, optimizer = case.strategy.prepare(case.mlp(seed=2), SGD(0.1))
    with refused(CheckpointError, "Adam", "SGD"):
        case.strategy.load(case.folder / "adam", model=model, optimizer=optimizer)
    close(case.parameters(model), reference.weights(2), tolerance=0)


@check
def saving_at_the_wrong_time_is_refused(case: Case) -> None:
    model = case.strategy.prepare(case.mlp())
    with refused(UsageError, "model="):
        case.strategy.save(case.folder / "x", optimizer=object())
    with refused(UsageError, "strategy.loader()", "list"):
        case.strategy.save(case.folder / "x", model=model, loader=[1])
    with refused(UsageError, "keep="):
        case.strategy.save(case.folder / "x", model=model, keep=2)


@check
def saving_inside_a_group_is_refused(case: Case) -> None:
    case.requires("accumulate", "optimizer_state")
    model, optimizer = case.strategy.prepare(case.mlp(), SGD(0.1), accumulate=2)
    step = case.strategy.train_step(model, optimizer, case.zoo.cross_entropy)
    for x, y in case.strategy.loader(reference.data(8 * case.backend.devices * case.size), per_device_batch=4):
        step(x, y)
        break
    with refused(StateError, "accumulation"):
        case.strategy.save(case.folder / "x", model=model, optimizer=optimizer)

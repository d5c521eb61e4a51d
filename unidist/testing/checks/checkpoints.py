"""Promise 8: checkpoints that resume the same curve, refuse what does not fit, and fail on every rank alike."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from unidist.errors import CheckpointError, PeerFailed, StateError, UnsupportedOperation, UsageError
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


def promised(case: Case) -> bool:
    if case.strategy.capabilities.optimizer_state is True:
        return True
    model, optimizer = case.strategy.prepare(case.mlp(), SGD(0.1))
    with refused(UnsupportedOperation, case.strategy.capabilities.optimizer_state):
        case.strategy.save(case.folder / "refused", model=model, optimizer=optimizer)
    return False


@check
def resumed_run_goes_on_as_if_nothing_had_happened(case: Case) -> None:
    """From the end of an epoch and from the middle of one, saved in passing or after a stop; to the last bit where sums
    of ranks are exact. A run can be resumed into new parts as well as into used ones."""
    if not promised(case):
        return
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
            if case.strategy.capabilities.synchronous is not True:
                continue
            close(stopped.losses, whole.losses[:6], tolerance)
            close(resumed.losses, whole.losses[stop:], tolerance)
            close(case.parameters(resumed.model), case.parameters(whole.model), tolerance)


@check
def random_numbers_resume(case: Case) -> None:
    """Each rank's own, as dropout draws them."""
    model = case.strategy.prepare(case.mlp())
    np.random.seed(case.rank)
    case.strategy.save(case.folder / "random", model=model)
    expected, dropped = np.random.rand(3), case.zoo.draw()
    np.random.seed(99)
    case.strategy.load(case.folder / "random", model=model)
    assert (np.random.rand(3) == expected).all()
    assert (case.zoo.draw() == dropped).all()


@check
def last_checkpoints_are_kept(case: Case) -> None:
    if not promised(case):
        return
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
    own = case.strategy.prepare(case.mlp())
    with refused(CheckpointError, "does not fit", "unexpected"):
        case.strategy.load(case.folder / "other", model=own)
    close(case.parameters(own), reference.weights(), tolerance=0)
    with refused(CheckpointError, "nowhere"):
        case.strategy.load(case.folder / "nowhere", model=own)


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
    if not promised(case):
        return
    model, optimizer = case.strategy.prepare(case.mlp(), Adam(0.1))
    case.strategy.save(case.folder / "adam", model=model, optimizer=optimizer)
    model, optimizer = case.strategy.prepare(case.mlp(seed=2), SGD(0.1))
    with refused(CheckpointError, "Adam", "SGD"):
        case.strategy.load(case.folder / "adam", model=model, optimizer=optimizer)
    close(case.parameters(model), reference.weights(2), tolerance=0)


@check
def failure_to_write_reaches_every_rank(case: Case) -> None:
    model = case.strategy.prepare(case.mlp())
    blocked = case.folder / "a-file"
    with case.strategy.main_first():
        if case.rank == 0:
            Path(blocked).write_text("in the way")
    with refused(CheckpointError if case.rank == 0 else PeerFailed, "a-file"):
        case.strategy.save(blocked / "below", model=model)
    assert case.strategy.all_reduce(1, "sum") == case.size  # and the job can go on


@check
def saving_at_the_wrong_time_is_refused(case: Case) -> None:
    model = case.strategy.prepare(case.mlp())
    with refused(UsageError, "model="):
        case.strategy.save(case.folder / "x", optimizer=object())
    with refused(UsageError, "keep="):
        case.strategy.save(case.folder / "x", model=model, keep=2)
    if case.strategy.capabilities.accumulate is not True or not promised(case):
        return
    model, optimizer = case.strategy.prepare(case.mlp(), SGD(0.1), accumulate=2)
    step = case.strategy.train_step(model, optimizer, case.zoo.cross_entropy)
    for x, y in case.strategy.loader(reference.data(8 * case.backend.devices * case.size), per_device_batch=4):
        step(x, y)
        break
    with refused(StateError, "accumulation"):
        case.strategy.save(case.folder / "x", model=model, optimizer=optimizer)

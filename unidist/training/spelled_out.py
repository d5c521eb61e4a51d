"""The step spelled out: `forward`, `backward` and `step`, in this order, for loops that are written that way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from unidist.backend import MicroBatch
from unidist.data.nested import arrays_of
from unidist.data.tracking import BatchInfo
from unidist.errors import StateError, UnsupportedOperation, UsageError
from unidist.training.accumulation import Prepared, Reduction, StepPlan
from unidist.training.trainer import Trainer, check_reduction, check_scalar


@dataclass
class _OpenStep:
    """A spelled-out step that has been begun."""

    prepared: Prepared
    micro: MicroBatch = field(default_factory=MicroBatch)
    done: str = ""  # "forward", "backward"
    infos: list[BatchInfo] = field(default_factory=list)
    batch: list[Any] = field(default_factory=list)  # the first array of each call of the model
    plan: StepPlan | None = None


class SpelledOut:
    """The step that is being made, part by part."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._open: _OpenStep | None = None
        trainer.on_inputs = self._on_inputs

    def is_open(self, model: Any) -> bool:
        """A spelled-out step of this model was begun."""
        return self._open is not None and self._open.prepared.model() is model

    def _on_inputs(self, arguments: tuple[Any, ...]) -> None:
        """The model is called: inside forward(), with the batch."""
        opened = self._open
        if opened is None or opened.done:
            return
        arrays = arrays_of(arguments)
        opened.batch += arrays[:1]
        found = self._trainer.weighing.batches.find(arrays, id(opened.prepared.schedule))
        opened.infos += found
        for info in found:
            if info.real == 0:
                opened.micro.weight = 0.0
            elif info.padded:
                raise UnsupportedOperation(
                    f"this batch holds {info.rows - info.real} rows of padding that your loss would average over: use "
                    "tail='keep', or train_step, which leaves them out"
                )

    @contextmanager
    def forward(self, model: Any) -> Iterator[None]:
        self._trainer.require("spelled_out")
        if self._open is not None:
            raise StateError(f"forward() again, but the last step was left after {self._open.done}(): finish it first")
        prepared = self._the_model(model)
        self._open = opened = _OpenStep(prepared)
        try:
            with self._trainer.backend.forward(prepared.model(), opened.micro):
                yield
        except BaseException:
            self._open = None
            prepared.schedule.give_up(prepared.schedule.updates)
            raise
        opened.done = "forward"

    def backward(self, loss: Any, weight: Any, reduction: Reduction) -> None:
        opened = self._open
        if opened is None or opened.done != "forward":
            raise StateError("backward() needs a loss computed inside `with strategy.forward():`, once for each")
        self._open = None
        schedule = opened.prepared.schedule
        try:
            check_scalar(loss)
            check_reduction(reduction)
            schedule.check_reduction(reduction)
            info, samples = self._trainer.weighing.weigh(schedule, opened.batch, weight, reduction, False, opened.infos)
            model = opened.prepared.model()
            with self._trainer.apart_from_others(model):
                opened.plan = self._trainer.begin(model, schedule, info, samples, reduction, weight is not None)
                self._trainer.watch.step(schedule.updates, schedule.exchanges, opened.plan.closes)
                vars(opened.micro).update(vars(opened.plan.micro), spelled_out=True)  # held since forward()
                self._trainer.backend.backward(model, loss, opened.micro)
            if not opened.plan.closes:
                self._trainer.watch.stepped()
        except BaseException:
            schedule.give_up(schedule.updates)
            self._trainer.watch.left_step()
            raise
        opened.done, self._open = "backward", opened

    def step(self, optimizer: Any, clip_norm: float | None) -> bool:
        opened = self._open
        if opened is None or opened.plan is None:
            raise StateError("step() comes after backward(loss)")
        model, plan = opened.prepared.model(), opened.plan
        prepared = self._trainer.prepared_as(model, optimizer)
        self._trainer.check_clip(clip_norm)
        self._open = None
        if plan.closes:
            try:
                self._trainer.backend.check_optimizer(model, optimizer)
            except UsageError:
                prepared.schedule.give_up(prepared.schedule.updates)
                self._trainer.watch.stepped()  # its exchange is made
                raise
            self._trainer.backend.apply(model, optimizer, prepared.schedule.update(plan, clip_norm))
            self._trainer.watch.stepped()
            self._trainer.after_update(model, prepared.schedule, plan, prepared.drift)
        return plan.closes

    def _the_model(self, model: Any) -> Prepared:
        trained = [entry for entry in self._trainer.prepared if entry.model() is not None]
        if model is None and len(trained) == 1:
            return trained[0]
        for entry in trained:
            if entry.model() is model:
                return entry
        if model is None:
            problem = (
                "several models are prepared: say forward(model)" if trained else "prepare(model, optimizer) first"
            )
            raise StateError(f"forward(): {problem}")
        raise UsageError("forward(model): this model was not returned by prepare(model, optimizer)")

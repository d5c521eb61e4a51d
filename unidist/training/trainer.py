"""Training steps: from a batch and a loss function to the calls that the backend makes of them."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from unidist.backend import Backend
from unidist.checks import check_positive
from unidist.control.watch import Watch
from unidist.data.tracking import BatchInfo, cut
from unidist.errors import StateError, UsageError
from unidist.training.accumulation import Prepared, Reduction, Schedule, StepPlan
from unidist.training.settings import Settings
from unidist.training.weighing import Weighing

if TYPE_CHECKING:
    from unidist.training.drift import DriftCheck


class Trainer:
    """The training side of a Strategy: what was prepared, and the step that is being taken."""

    def __init__(
        self,
        backend: Backend,
        watch: Watch,
        require: Callable[[str], None],
        on_step: Callable[[BatchInfo | None, bool], None],
    ) -> None:
        self.backend, self.watch, self.require = backend, watch, require
        self.weighing = Weighing(backend, watch, on_step)
        self.on_inputs: Callable[[tuple[Any, ...]], None] | None = None  # to be told what a model is called with
        self.prepared: list[Prepared] = []
        self._untrained: list[Prepared] = []  # without an optimizer
        self._schedules = 0  # that were made
        self.closed = False

    @contextmanager
    def apart_from_others(self, model: Any) -> Iterator[None]:
        """Inside, a micro-batch of this model is computed: the groups that others have begun stay as they are."""
        with ExitStack() as stack:
            for entry in self.prepared:
                other = entry.model()
                if entry.schedule.in_group and other is not None and other is not model:
                    stack.enter_context(self.backend.keep_gradients(other, model))
            yield

    def begin(
        self,
        model: Any,
        schedule: Schedule,
        info: BatchInfo | None,
        samples: float,
        reduction: Reduction,
        told: bool,
    ) -> StepPlan:
        if self.closed:
            raise StateError("this Strategy is closed: do the work inside its `with` block")
        if self.weighing.batches.lost_end() and schedule.in_group:
            raise StateError(
                f"the last batch of a pass did not come to a step as it was, and a group of {schedule.place} batches "
                "is incomplete: call flush(model, optimizer) after the loop, which makes the update of such a group"
            )
        if not schedule.in_group and (schedule.stale or len(self.prepared) > 1):
            self.backend.clear_gradients(model)
            schedule.stale = False
        ends, in_turn = (False, False) if info is None else self._walk(schedule, info)
        largest = partial(self.weighing.compare_first, schedule, info is not None, told)
        return schedule.plan(samples, info, largest, reduction, told=told, last=ends, in_turn=in_turn)

    def _walk(self, schedule: Schedule, info: BatchInfo) -> tuple[bool, bool]:
        before, schedule.last_pass = schedule.last_pass, info.origin
        if schedule.in_group and before is not None and before is not info.origin and before.unending(id(schedule)):
            raise StateError(
                f"several steps were made of one batch, so the last one of a pass could not be seen, and a group of "
                f"{schedule.place} batches is incomplete: call flush(model, optimizer) after the loop, which makes the "
                "update of such a group"
            )
        return info.origin.walk(id(schedule), info)

    def _nothing(self, loss: Any) -> Any:
        """What a rank without samples adds to the global loss. (0 times a loss that is not a number would not be 0.)"""
        import numpy as np

        return self.backend.from_numpy(np.zeros_like(self.backend.to_numpy(loss)))

    def _total(self, weight: float) -> float:
        return float(self.watch.collectives.all_reduce(weight, "sum"))

    def after_update(self, model: Any, schedule: Schedule, plan: StepPlan, drift: DriftCheck) -> None:
        """Average what went apart, and compare what must be equal."""
        if plan.average:
            with self.watch.within("average parameters"):
                self.backend.average(model, "parameters")
        if not schedule.comparable or self.backend.world.world_size == 1:
            return
        every, due = 1 if self.watch.checking else schedule.check_every, drift.updated()
        if due or (every and schedule.updates % every == 0):
            drift.compare(model, schedule.updates)

    def compare(self, model: Any) -> None:
        """Before a checkpoint: what one rank writes must be what all of them hold."""
        for entry in self.prepared + self._untrained:
            if entry.model() is model and entry.schedule.comparable and self.backend.world.world_size > 1:
                entry.drift.compare(model, entry.schedule.updates)

    @property
    def comparable(self) -> list[Prepared]:
        """The models whose parameters must be the same on all ranks now."""
        if self.backend.capabilities.lockstep is not True:
            return []
        return [entry for entry in self.prepared + self._untrained if entry.schedule.comparable]

    def schedules_of(self, model: Any) -> list[Schedule]:
        """Of all optimizers that this model was prepared with."""
        return [entry.schedule for entry in self.prepared if model is not None and entry.model() is model]

    def gave_last(self, value: Any) -> bool:
        """Whether this is the loss that a step of some model gave back last."""
        return any(value is entry.schedule.last_loss for entry in self.prepared)

    # -- prepare ---------------------------------------------------------------------------------------------

    def prepare(self, model: Any, optimizer: Any, settings: Settings) -> Any:
        from unidist.training.drift import DriftCheck  # which needs numpy

        ranks = self.backend.world.world_size
        exchanges = ranks > 1 and self.backend.capabilities.lockstep is True
        self._schedules += 1
        schedule = Schedule(
            optimizer,
            settings.accumulate,
            settings.sync_every,
            exchanges=exchanges,
            ranks=ranks,
            check_every=settings.check_every,
        )
        schedule.number = self._schedules
        with self.watch.within("prepare"):
            model, optimizer = self.backend.prepare(model, optimizer, settings.features)
        self.prepared = [entry for entry in self.prepared if entry.model() is not None]
        self._untrained = [entry for entry in self._untrained if entry.model() is not None]
        drift = DriftCheck(self.backend, self.watch.collectives)
        if optimizer is None:
            self._untrained.append(Prepared(weakref.ref(model), lambda: None, schedule, drift))
            return model
        self.prepared.append(Prepared(weakref.ref(model), weakref.ref(optimizer), schedule, drift))
        if self.backend.capabilities.spelled_out is True and self.on_inputs is not None:
            self.backend.on_inputs(model, self.on_inputs)
        return model, optimizer

    def prepared_as(self, model: Any, optimizer: Any) -> Prepared:
        for entry in self.prepared:
            if entry.model() is model and entry.optimizer() is optimizer:
                return entry
        raise UsageError("this model and optimizer do not come from one `prepare` call: use the two that it returned")

    # -- the whole step ----------------------------------------------------------------------------------------

    def train_step(
        self,
        model: Any,
        optimizer: Any,
        loss_fn: Callable[..., Any],
        clip_norm: float | None,
        compile: bool,
        reduction: Reduction,
    ) -> Callable[..., Any]:
        prepared = self.prepared_as(model, optimizer)
        schedule, drift = prepared.schedule, prepared.drift
        self.check_clip(clip_norm)
        check_reduction(reduction)
        if compile:
            self.require("compile")
        run = self.backend.train_step(model, optimizer, _scalar(loss_fn), compile)
        watch, ranks = self.watch, self.backend.world.world_size

        def step(*batch: Any, weight: Any = None) -> Any:
            if len(self.prepared) == 1:
                return make(batch, weight)
            with self.apart_from_others(model):
                return make(batch, weight)

        def make(batch: tuple[Any, ...], weight: Any) -> Any:
            self.backend.check_optimizer(model, optimizer)
            schedule.check_reduction(reduction)
            info, samples = self.weighing.weigh(schedule, batch, weight, reduction, whole=True)
            if info is not None and 0 < info.real < info.rows:
                batch = cut(batch, info.rows, info.real)
            plan, updates = self.begin(model, schedule, info, samples, reduction, weight is not None), schedule.updates
            watch.step(updates, schedule.exchanges, plan.closes)
            try:
                loss, mean_weight = run(batch, plan.micro, schedule.update(plan, clip_norm) if plan.closes else None)
            except BaseException:
                schedule.give_up(updates)
                watch.left_step()
                raise
            watch.stepped()
            if plan.closes:
                self.after_update(model, schedule, plan, drift)
            micro = plan.micro
            if not micro.weight:
                loss = self._nothing(loss)
            elif info is not None and weight is None and reduction == "mean":
                share = info.real * ranks / info.total
                loss = loss if share == 1.0 else loss * share
            elif plan.rescale is None and plan.closes and schedule.single:
                same = isinstance(mean_weight, float) and mean_weight == micro.weight
                loss = loss if same else loss * (micro.weight / mean_weight)
            schedule.last_loss = loss
            return loss

        return step

    def flush(self, model: Any, optimizer: Any, clip_norm: float | None) -> bool:
        prepared = self.prepared_as(model, optimizer)
        schedule = prepared.schedule
        self.check_clip(clip_norm)
        self.weighing.batches.lost_end()  # it has been seen to
        if not schedule.in_group:
            return False
        self.backend.check_optimizer(model, optimizer)
        plan = schedule.close_group(self._total)
        if plan.micro.sync:
            with self.watch.within("average gradients"):
                self.backend.average(model, "gradients")
        self.backend.apply(model, optimizer, schedule.update(plan, clip_norm))
        self.after_update(model, schedule, plan, prepared.drift)
        return True

    def brought_together(self, model: Any) -> None:
        """Its parameters have been averaged by hand."""
        for entry in self.prepared:
            if entry.model() is model:
                entry.schedule.brought_together()

    def check_clip(self, clip_norm: float | None) -> None:
        if clip_norm is None:
            return
        self.require("clip_norm")
        check_positive("clip_norm", clip_norm)


def check_reduction(reduction: object) -> None:
    if reduction not in ("mean", "sum"):
        raise UsageError(f"reduction is {reduction!r}, it must be 'mean' or 'sum': what the loss is of its samples")


def check_scalar(loss: Any) -> None:
    shape = getattr(loss, "shape", None)
    if shape is None:
        raise UsageError(f"the loss is of type {type(loss).__name__}, it must be a tensor that the model computed")
    if shape and math.prod(shape) != 1:
        raise UsageError(
            f"the loss has shape {tuple(shape)}, it must be one number, the mean over the local batch: call .mean()"
        )


def _scalar(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*arguments: Any) -> Any:
        loss = loss_fn(*arguments)
        check_scalar(loss)
        return loss

    return checked

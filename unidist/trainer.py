"""Training steps: from a batch and a loss function to the calls that the backend makes of them."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from unidist import compression as compressions
from unidist.backend import Backend, Features
from unidist.errors import StateError, UnsupportedOperation, UsageError
from unidist.optim import OptimizerSpec
from unidist.training import Prepared, Schedule, Turn
from unidist.watch import Watch

if TYPE_CHECKING:
    from unidist.data.loader import Drawn


class Trainer:
    """The training side of a Strategy: what was prepared, and the step that is being taken."""

    def __init__(self, backend: Backend, watch: Watch, require: Callable[[str], None]) -> None:
        self._backend, self._watch, self._require = backend, watch, require
        self._prepared: list[Prepared] = []
        self._open: tuple[Any, Schedule, Turn, str] | None = None  # spelled-out step: what it is, what has been done
        self._passes: list[Drawn] = []  # the last batch of each pass that is under way, the innermost last
        self._tails: list[tuple[weakref.ref[Any], Drawn]] = []  # batches that do not count like the others
        self.closed = False

    # -- which batch a step is made of -----------------------------------------------------------------------

    def on_batch(self, drawn: Drawn, batch: Any) -> None:
        """A loader hands it out. The weight of a step depends on it, and so does the end of an accumulation group."""
        if self._passes and self._passes[-1].origin is drawn.origin:
            self._passes[-1] = drawn
        else:
            self._passes = [each for each in self._passes if each.origin is not drawn.origin] + [drawn]
        if drawn.last or drawn.real != drawn.rows or drawn.weight != 1.0:
            self._tails = [each for each in self._tails if each[0]() is not None]
            with contextlib.suppress(TypeError):  # not every framework's tensors can be referred to weakly
                self._tails.append((weakref.ref(_first_leaf(batch)), drawn))

    def on_end(self, origin: object) -> None:
        """A pass was finished or left: later steps on data from elsewhere must not inherit its weights."""
        self._passes = [each for each in self._passes if each.origin is not origin]

    def _drawn(self, batch: Any) -> Drawn | None:
        """Of a batch that was kept, as in `list(loader)`, its own; else the one handed out last."""
        if self._tails and batch:
            leaf = _first_leaf(batch)
            for kept, drawn in self._tails:
                if kept() is leaf:
                    return drawn
        return self._passes[-1] if self._passes else None

    def _begin(self, model: Any, schedule: Schedule, drawn: Drawn | None) -> Turn:
        if self.closed:
            raise StateError("this Strategy is closed: do the work inside its `with` block")
        if not schedule.in_group and (schedule.stale or len(self._prepared) > 1):
            self._backend.clear_gradients(model)
            schedule.stale = False
        self._backend.uneven = drawn is not None and drawn.uneven
        self._backend.padding_only = drawn is not None and drawn.real == 0
        return schedule.turn(drawn)

    # -- prepare ---------------------------------------------------------------------------------------------

    def prepare(
        self,
        model: Any,
        optimizer: Any,
        *,
        accumulate: int,
        sync_every: int,
        sync_batchnorm: bool,
        precision: Any,
        compression: Any,
    ) -> Any:
        _whole("accumulate", accumulate, 1)
        _whole("sync_every", sync_every, 0)
        if precision not in (None, "bf16", "fp16"):
            raise UsageError(f"precision is {precision!r}, it must be 'bf16', 'fp16' or None")
        compressions.check(compression, precision)
        local = sync_every != 1
        if local and compression is not None:
            raise UsageError(
                "compression= makes gradients travel lighter, with sync_every= they do not travel: choose one"
            )
        for asked, capability in (
            (accumulate > 1, "accumulate"),
            (local, "local_sgd"),
            (sync_batchnorm, "sync_batchnorm"),
            (precision is not None, "mixed_precision"),
            (compression is not None, "compression"),
            (optimizer is not None and not isinstance(optimizer, OptimizerSpec), "native_optimizer"),
        ):
            if asked:
                self._require(capability)
        lockstep = self._backend.capabilities.lockstep is True
        schedule = None if optimizer is None else Schedule(optimizer, accumulate, sync_every, lockstep)
        model, optimizer = self._backend.prepare(
            model, optimizer, Features(sync_batchnorm, precision, compression, local)
        )
        self._prepared = [each for each in self._prepared if each.model() is not None]
        if schedule is not None:
            self._prepared.append(Prepared(weakref.ref(model), weakref.ref(optimizer), schedule))
        return model if optimizer is None else (model, optimizer)

    def schedule_of(self, model: Any, optimizer: Any) -> Schedule:
        for each in self._prepared:
            if each.model() is model and each.optimizer() is optimizer:
                return each.schedule
        raise UsageError("this model and optimizer do not come from one `prepare` call: use the two that it returned")

    # -- the whole step ----------------------------------------------------------------------------------------

    def train_step(
        self, model: Any, optimizer: Any, loss_fn: Callable[..., Any], clip_norm: float | None, compile: bool
    ) -> Callable[..., Any]:
        schedule = self.schedule_of(model, optimizer)
        self._check_clip(clip_norm)
        if compile:
            self._require("compile")
        run = self._backend.train_step(model, optimizer, _scalar(loss_fn), compile)
        watch, average = self._watch, self._backend.average

        def step(*batch: Any) -> Any:
            drawn = self._drawn(batch)
            if drawn is not None and 0 < drawn.real < drawn.rows:
                batch = _without_padding(batch, drawn)
            turn, updates = self._begin(model, schedule, drawn), schedule.updates
            watch.step(updates)
            try:
                loss = run(batch, turn.weight, turn.sync, schedule.update(turn, clip_norm) if turn.closes else None)
            except BaseException:
                schedule.give_up(updates)
                raise
            if turn.average:
                average(model, "parameters")
            return loss if drawn is None or drawn.weight == 1.0 else loss * drawn.weight

        return step

    # -- the step spelled out ----------------------------------------------------------------------------------

    @contextmanager
    def forward(self, model: Any) -> Iterator[None]:
        self._require("spelled_out")
        if self._open is not None:
            raise StateError(f"forward() again, but the last step was left after {self._open[3]}(): finish it first")
        model, schedule = self._the_model(model)
        drawn = self._drawn(None)
        if drawn is not None and 0 < drawn.real < drawn.rows:
            raise UnsupportedOperation(
                f"this batch holds {drawn.rows - drawn.real} rows of padding that your loss would average over: use "
                "tail='keep', or train_step, which leaves them out"
            )
        turn = self._begin(model, schedule, drawn)
        self._open = (model, schedule, turn, "forward")
        try:
            with self._backend.forward(model, turn.sync):
                yield
        except BaseException:
            self._open = None
            schedule.give_up(schedule.updates)
            raise

    def backward(self, loss: Any) -> None:
        if self._open is None or self._open[3] != "forward":
            raise StateError("backward() needs a loss computed inside `with strategy.forward():`, once for each")
        model, schedule, turn, _ = self._open
        self._open = None
        try:
            _check_scalar(loss)
            self._watch.step(schedule.updates)
            self._backend.backward(model, loss, turn.weight)
        except BaseException:
            schedule.give_up(schedule.updates)
            raise
        self._open = (model, schedule, turn, "backward")

    def step(self, optimizer: Any, clip_norm: float | None) -> bool:
        if self._open is None or self._open[3] != "backward":
            raise StateError("step() comes after backward(loss)")
        model, _, turn, _ = self._open
        schedule = self.schedule_of(model, optimizer)
        self._check_clip(clip_norm)
        self._open = None
        if turn.closes:
            self._backend.apply(model, optimizer, schedule.update(turn, clip_norm))
        if turn.average:
            self._backend.average(model, "parameters")
        return turn.closes

    def flush(self, model: Any, optimizer: Any, clip_norm: float | None) -> bool:
        schedule = self.schedule_of(model, optimizer)
        self._check_clip(clip_norm)
        if not schedule.in_group:
            return False
        turn = schedule.close_group()
        if turn.sync:
            self._backend.average(model, "gradients")
        self._backend.apply(model, optimizer, schedule.update(turn, clip_norm))
        if turn.average:
            self._backend.average(model, "parameters")
        return True

    def brought_together(self, model: Any) -> None:
        """Its parameters have been averaged by hand."""
        for each in self._prepared:
            if each.model() is model:
                each.schedule.brought_together()

    def _check_clip(self, clip_norm: float | None) -> None:
        if clip_norm is None:
            return
        self._require("clip_norm")
        if isinstance(clip_norm, bool) or not isinstance(clip_norm, (int, float)) or not clip_norm > 0:
            raise UsageError(f"clip_norm is {clip_norm!r}, it must be a number above 0")

    def _the_model(self, model: Any) -> tuple[Any, Schedule]:
        trained = [(each.model(), each.schedule) for each in self._prepared if each.model() is not None]
        if model is None and len(trained) == 1:
            return trained[0]
        for each, schedule in trained:
            if each is model:
                return each, schedule
        if model is None:
            problem = (
                "several models are prepared: say forward(model)" if trained else "prepare(model, optimizer) first"
            )
            raise StateError(f"forward(): {problem}")
        raise UsageError("forward(model): this model was not returned by prepare(model, optimizer)")


def _first_leaf(batch: Any) -> Any:
    while isinstance(batch, (list, tuple, dict)) and batch:
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    return batch


def _whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name} is {value!r}, it must be a whole number from {least}")


def _check_scalar(loss: Any) -> None:
    shape = getattr(loss, "shape", None)
    if shape is None:
        raise UsageError(f"the loss is a {type(loss).__name__}, it must be a tensor that the model computed")
    if shape and math.prod(shape) != 1:
        raise UsageError(
            f"the loss has shape {tuple(shape)}, it must be one number, the mean over the local batch: call .mean()"
        )


def _scalar(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*arguments: Any) -> Any:
        loss = loss_fn(*arguments)
        _check_scalar(loss)
        return loss

    return checked


def _without_padding(value: Any, drawn: Drawn) -> Any:
    """The rows of a batch that are samples; what is not a batch passes through."""
    if isinstance(value, dict):
        return {key: _without_padding(each, drawn) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [_without_padding(each, drawn) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    shape = getattr(value, "shape", None)
    return value[: drawn.real] if shape and shape[0] == drawn.rows else value

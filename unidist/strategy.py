"""`Strategy`: what users hold. It checks state and arguments once, then calls the backend."""

from __future__ import annotations

import builtins
import json
import math
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from unidist import registry
from unidist._version import __version__
from unidist.errors import PeerFailed, StateError, UnsupportedOperation, UsageError
from unidist.training import Prepared, Schedule, Turn
from unidist.watch import Watch
from unidist.world import World, detect

if TYPE_CHECKING:
    import numpy as np

    from unidist.collectives import Collectives
    from unidist.data.batch import Scale
    from unidist.data.loader import Drawn, Loader
    from unidist.data.order import Epoch, Tail


class Strategy:
    """One process's view of a distributed job. Use it as `with unidist.Strategy("torch") as strategy:`.

    backend      "torch", ...; not given: UNIDIST_BACKEND, the launcher's variables, or what is installed
    init         "tcp://host:port" or "file:///path" with `rank` and `world_size`, for processes started by hand;
                 not given: found in the environment (see `unidist.world`)
    device       "cpu", "cuda", "cuda:1"; not given: a GPU for each process if there are any
    timeout      seconds to wait for the other ranks at the start
    options      the backend's own; an unknown one is refused, with the nearest right name

    Leaving `with` after an exception never waits for the other ranks.
    """

    def __init__(
        self,
        backend: str | None = None,
        *,
        init: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        device: str | None = None,
        timeout: float = 300.0,
        **options: Any,
    ) -> None:
        plugin, why = registry.choose(backend)
        settings = registry.build_options(plugin, _with_launch_options(plugin.name, options))
        found = detect(init=init, rank=rank, world_size=world_size, timeout=timeout)
        if found.role != "worker":
            registry.serve(plugin, found, settings)
        engine = registry.backend_class(plugin)
        self._backend = engine(found, settings, device, timeout)
        self._closed = False
        self._name = plugin.name
        self._prepared: list[Prepared] = []
        self._drawn: Drawn | None = None  # the training batch that the loop body is working on
        self._last_drawn: Drawn | None = None  # the batch, of any loader, that the next gather belongs to
        self._evaluating = 0
        self._open: tuple[Any, Turn, str] | None = None  # spelled-out step: (model, turn, what has been done)
        self._watch = Watch(self._backend)
        if self.is_main:
            world, nodes = self.world, self.world.num_nodes
            self._say(
                f"unidist {__version__}: {self._name} {self._backend.version} ({why}), {world.world_size} "
                f"process{'es' * (world.world_size > 1)} on {nodes or '?'} node{'s' * (nodes != 1)} from "
                f"{world.source} ({world.reason}), device {self.device}, transport {self._backend.transport}"
            )

    # -- who and where ---------------------------------------------------------------------------------------

    @property
    def world(self) -> World:
        return self._backend.world

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def local_rank(self) -> int:
        return self.world.local_rank

    @property
    def world_size(self) -> int:
        return self.world.world_size

    @property
    def node_rank(self) -> int:
        return self.world.node_rank

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def device(self) -> str:
        return self._backend.device

    @property
    def framework(self) -> str:
        """What models are written in: "torch", "mxnet" or "oneflow"."""
        return self._backend.framework

    @property
    def backend(self) -> str:
        return self._name

    @property
    def capabilities(self) -> Any:
        return self._backend.capabilities

    # -- life ------------------------------------------------------------------------------------------------

    def __enter__(self) -> Strategy:
        self._require_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(failed=kind is not None)

    def close(self) -> None:
        """Meet the other ranks a last time and leave. `with` does it."""
        self._leave(failed=False)

    def _leave(self, failed: bool) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._backend.close(failed)
        finally:
            self._watch.close()

    def _require_open(self) -> None:
        if self._closed:
            raise StateError("this Strategy is closed: do the work inside its `with` block")

    def _require(self, capability: str) -> None:
        answer = getattr(self._backend.capabilities, capability)
        if answer is not True:
            raise UnsupportedOperation(f"{self._name} does not support {capability}: {answer}")

    # -- output ----------------------------------------------------------------------------------------------

    def print(self, *values: object, **how: Any) -> None:
        """`print` on rank 0, nothing on the others."""
        if self.is_main:
            builtins.print(*values, **{"flush": True, **how})

    def log(self, *values: object) -> None:
        """A line from any rank, to standard error, with the rank in front."""
        self._say(f"[rank {self.rank}] " + " ".join(map(str, values)))

    def _say(self, line: str) -> None:
        sys.stderr.write(line + "\n")  # one write: lines of several processes do not mix
        sys.stderr.flush()

    # -- training --------------------------------------------------------------------------------------------

    def prepare(self, model: Any, optimizer: Any = None, *, accumulate: int = 1) -> Any:
        """Make the model ready to train: on the device, equal to rank 0's everywhere, gradients averaged.

        `optimizer` is `unidist.SGD`, `Adam`, `AdamW` or a native one that holds the model's parameters. Returns the
        native (model, optimizer), or the model alone when no optimizer was given. With `accumulate=4` the loop does
        not change: gradients of four batches make one update, and so does an incomplete group at the end of a pass.
        """
        self._require_open()
        if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
            raise UsageError(f"accumulate is {accumulate!r}, it must be a whole number above 0")
        if accumulate > 1:
            self._require("accumulate")
        from unidist.same_start import compare_ranks

        notice = compare_ranks(self._backend.state(model), self._backend.to_numpy, self._collectives)
        if notice and self.is_main:
            self._say(f"unidist: {notice}")
        schedule = None if optimizer is None else Schedule(optimizer, accumulate, self.capabilities.lockstep is True)
        model, optimizer = self._backend.prepare(model, optimizer)
        self._prepared = [each for each in self._prepared if each.model() is not None]
        if schedule is not None:
            self._prepared.append(Prepared(weakref.ref(model), weakref.ref(optimizer), schedule))
        return model if optimizer is None else (model, optimizer)

    def train_step(
        self, model: Any, optimizer: Any, loss_fn: Callable[..., Any], *, clip_norm: float | None = None
    ) -> Callable[..., Any]:
        """One callable for the whole step: `step(x, y)` computes `loss_fn(model, x, y)`, and trains on it.

        It returns this rank's share of the loss: `strategy.mean` of it is the mean over the global batch, also when
        the ranks' batches differ in size.
        """
        self._require_open()
        schedule = self._schedule_of(model, optimizer)
        self._check_clip(clip_norm)
        run = self._backend.train_step(model, optimizer, _scalar(loss_fn))
        watch = self._watch

        def step(*batch: Any) -> Any:
            drawn = self._drawn
            if drawn is not None and drawn.real < drawn.rows and drawn.real:
                batch = _without_padding(batch, drawn)
            turn = schedule.turn(drawn)
            watch.step(schedule.updates)
            loss = run(batch, turn.weight, schedule.update(turn, clip_norm) if turn.closes else None)
            return loss if drawn is None or drawn.weight == 1.0 else loss * drawn.weight

        return step

    @contextmanager
    def forward(self, model: Any = None) -> Iterator[None]:
        """The spelled-out step, first part: compute the loss inside. Name the model when several are prepared."""
        self._require_open()
        self._require("spelled_out")
        if self._open is not None:
            raise StateError(
                f"forward() again, but the last step was left after {self._open[2]}(): finish it with step()"
            )
        model, schedule = self._the_model(model)
        drawn = self._drawn
        if drawn is not None and 0 < drawn.real < drawn.rows:
            raise UnsupportedOperation(
                f"this batch holds {drawn.rows - drawn.real} rows of padding that your loss would average over: use "
                "tail='keep', or train_step, which leaves them out"
            )
        turn = schedule.turn(drawn)
        self._open = (model, turn, "forward")
        try:
            with self._backend.forward(model, turn.closes):
                yield
        except BaseException:
            self._open = None
            raise

    def backward(self, loss: Any) -> None:
        """The spelled-out step, second part: gradients of the mean over all ranks."""
        if self._open is None or self._open[2] != "forward":
            raise StateError(
                "backward() needs a loss that was computed inside `with strategy.forward():`, once for each"
            )
        model, turn, _ = self._open
        self._open = None
        _check_scalar(loss)
        self._watch.step(self._the_model(model)[1].updates)
        self._backend.backward(model, loss, turn.weight)
        self._open = (model, turn, "backward")

    def step(self, optimizer: Any, *, clip_norm: float | None = None) -> bool:
        """The spelled-out step, last part: clip, apply, clear. True when an update was made."""
        if self._open is None or self._open[2] != "backward":
            raise StateError("step() comes after backward(loss)")
        model, turn, _ = self._open
        schedule = self._schedule_of(model, optimizer)
        self._check_clip(clip_norm)
        self._open = None
        if turn.closes:
            self._backend.apply(model, optimizer, schedule.update(turn, clip_norm))
        return turn.closes

    def unwrap(self, model: Any) -> Any:
        """Your own model inside what `prepare` returned."""
        return self._backend.unwrap(model)

    def _check_clip(self, clip_norm: float | None) -> None:
        if clip_norm is None:
            return
        self._require("clip_norm")
        if isinstance(clip_norm, bool) or not isinstance(clip_norm, (int, float)) or not clip_norm > 0:
            raise UsageError(f"clip_norm is {clip_norm!r}, it must be a number above 0")

    def _schedule_of(self, model: Any, optimizer: Any) -> Schedule:
        for each in self._prepared:
            if each.model() is model and each.optimizer() is optimizer:
                return each.schedule
        raise UsageError("this model and optimizer do not come from one `prepare` call: use the two that it returned")

    def _the_model(self, model: Any) -> tuple[Any, Schedule]:
        trained = [(each.model(), each.schedule) for each in self._prepared if each.model() is not None]
        if model is None and len(trained) == 1:
            return trained[0]
        for each, schedule in trained:
            if each is model:
                return each, schedule
        if model is None:
            problem = (
                "several models are prepared: say forward(model)"
                if trained
                else "prepare(model, optimizer) comes first"
            )
            raise StateError(f"forward(): {problem}")
        raise UsageError("forward(model): this model was not returned by prepare(model, optimizer)")

    # -- data and evaluation ---------------------------------------------------------------------------------

    def loader(
        self,
        data: Any,
        *,
        per_device_batch: int | None = None,
        global_batch: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        tail: Tail = "keep",
        scale: Scale | None = None,
        prefetch: bool = True,
        keep_float64: bool = False,
    ) -> Loader:
        """Batches of this rank's share of `data`: arrays, .npy paths (read as memory maps), tuples or dicts of them.

        Give one of `per_device_batch` and `global_batch`; `loader.batch` shows the arithmetic. `shuffle` reorders by
        (seed, epoch), the same on every backend and world size. `tail` says what becomes of the last, incomplete
        global batch: "keep" (shared out, weighted by sample count), "pad" (rows that weigh nothing), "drop".
        `scale="linear"` or "sqrt" makes `loader.batch.lr_scale` the factor for a rate tuned on one device.
        """
        self._require_open()
        from unidist.data.batch import Batch
        from unidist.data.loader import Loader

        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
            raise UsageError(f"seed is {seed!r}, it must be a whole number from 0 to below 2**63")
        batch = Batch.of(
            per_device_batch, global_batch, devices=self._backend.devices, workers=self.world_size, scale=scale
        )
        return Loader(
            data,
            batch,
            rank=self.rank,
            shuffle=shuffle,
            seed=seed,
            tail=tail,
            prefetch=prefetch,
            keep_float64=keep_float64,
            to_device=self._backend.from_numpy,
            on_batch=self._on_batch,
            on_end=self._on_end,
        )

    def _on_batch(self, drawn: Drawn) -> None:
        """The loader tells what it hands out: the weight of a training batch and the order in gather depend on it."""
        self._last_drawn = drawn
        if not self._evaluating:
            self._drawn = drawn

    def _on_end(self, epoch: Epoch) -> None:
        """A pass was finished or left: later steps on data from elsewhere must not inherit its weights."""
        if self._drawn is not None and self._drawn.epoch is epoch:
            self._drawn = None

    @contextmanager
    def evaluate(self, model: Any) -> Iterator[None]:
        """Inside: evaluation mode, no gradients, the bare model. Every rank enters; modes are restored after."""
        self._require_open()
        with self._watch.paused(), self._backend.evaluate(model):
            self._evaluating += 1
            try:
                yield
            finally:
                self._evaluating -= 1

    def gather(self, values: Any) -> np.ndarray[Any, Any]:
        """Per-sample results of every rank as one numpy array, in data-set order, each sample once.

        `values` is a list with one entry for each batch of the loader's last pass, or the result for its last batch
        alone. An entry has one row for each row of its batch; padding is dropped.
        """
        self._require_open()
        drawn = self._last_drawn
        if drawn is None:
            raise StateError(
                "gather() belongs to a pass over a loader, and there was none: for other values use all_gather"
            )
        import numpy as np

        from unidist.data.gather import in_order

        first = 0
        if not isinstance(values, (list, tuple)):
            values, first = [values], drawn.step
        if len(values) != drawn.step + 1 - first:
            raise UsageError(
                f"gather: the loader's last pass handed out {drawn.step + 1} batches, here are {len(values)} results"
            )
        arrays = [
            self._backend.to_numpy(each) if self._backend.is_tensor(each) else np.asarray(each) for each in values
        ]
        return in_order(arrays, drawn.epoch, first, self.rank, self._collectives.all_gather)

    def mean(self, values: Any) -> float:
        """The mean over all ranks of a number, an array, or a list of them such as the losses of an epoch."""
        self._require_open()
        import numpy as np

        parts = values if isinstance(values, (list, tuple)) else [values]
        arrays = [self._backend.to_numpy(each) if self._backend.is_tensor(each) else np.asarray(each) for each in parts]
        if any(array.dtype.kind not in "biuf" for array in arrays):
            raise UsageError(f"mean takes numbers, not {[type(each).__name__ for each in parts][:3]}")
        total = [
            float(sum(array.sum(dtype=np.float64) for array in arrays)),
            float(sum(array.size for array in arrays)),
        ]
        summed, count = self._collectives.all_reduce(total, "sum")
        if not count:
            raise UsageError("mean of nothing: the list is empty on every rank")
        return float(summed / count)

    # -- collectives -----------------------------------------------------------------------------------------

    def all_reduce(self, value: Any, op: str = "mean") -> Any:
        """`value` combined over all ranks: "mean", "sum", "min" or "max"; same kind, shape and nesting as given."""
        self._require_open()
        return self._collectives.all_reduce(value, op)

    def all_gather(self, value: Any) -> list[Any]:
        """A list with the value of each rank, by rank; shapes must be the same on all of them."""
        self._require_open()
        return self._collectives.all_gather(value)

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """The value of rank `source`, on every rank; the others pass something of the same shape."""
        self._require_open()
        if isinstance(source, bool) or not isinstance(source, int) or not 0 <= source < self.world_size:
            raise UsageError(f"source is {source!r}, ranks go from 0 to {self.world_size - 1}")
        return self._collectives.broadcast(value, source)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self._require_open()
        self._collectives.barrier()

    @contextmanager
    def main_first(self, local: bool = False) -> Iterator[None]:
        """Rank 0 (with `local`, the first process of each node) runs the block, then all the others do.

        For a download or a cache that is made once. When the first one raises, the others raise `PeerFailed`.
        """
        self._require_open()
        first = (self.local_rank if local else self.rank) == 0
        with self._watch.paused():
            if first:
                error: BaseException | None = None
                try:
                    yield
                except BaseException as raised:
                    error = raised
                self._collectives.all_reduce(int(error is not None), "max")  # releases the others in either case
                if error is not None:
                    raise error
            else:
                if self._collectives.all_reduce(0, "max"):
                    who = "the first process of a node" if local else "rank 0"
                    raise PeerFailed(f"{who} raised inside main_first(): see its error")
                yield

    @property
    def _collectives(self) -> Collectives:
        return self._watch.collectives


def _with_launch_options(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """`unidist run --option key=value` arrives in UNIDIST_OPTIONS; a contradiction with the call is refused."""
    if os.environ.get("UNIDIST_BACKEND") != name or not os.environ.get("UNIDIST_OPTIONS"):
        return given
    launched: dict[str, Any] = json.loads(os.environ["UNIDIST_OPTIONS"])
    for key, value in given.items():
        if launched.get(key, value) != value:
            raise UsageError(
                f"option {key} is {value!r} in Strategy(…) and {launched[key]!r} in `unidist run --option`: keep one"
            )
    return launched | given


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
        return type(value)(_without_padding(each, drawn) for each in value)
    shape = getattr(value, "shape", None)
    return value[: drawn.real] if shape and shape[0] == drawn.rows else value

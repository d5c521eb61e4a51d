"""`Strategy`: what users hold. It checks state and arguments once, then calls the backend."""

from __future__ import annotations

import builtins
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from unidist import registry
from unidist._version import __version__
from unidist.errors import PeerFailed, StateError, UnsupportedOperation, UsageError
from unidist.trainer import Trainer
from unidist.watch import Watch
from unidist.world import World, detect

if TYPE_CHECKING:
    import logging

    import numpy as np

    from unidist.backend import Plugin
    from unidist.collectives import Collectives
    from unidist.compression import Compression
    from unidist.data.batch import Scale
    from unidist.data.loader import Drawn
    from unidist.data.order import Tail
    from unidist.output import Metrics, Progress
    from unidist.training import Schedule


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
        settings = registry.build_options(plugin, _with_launch_options(plugin, options))
        found = detect(init=init, rank=rank, world_size=world_size, timeout=timeout)
        if found.role != "worker":
            registry.serve(plugin, found, settings)
        engine = registry.backend_class(plugin)
        self._watch = Watch(found)
        try:
            self._backend = engine(found, settings, device, timeout)
            self._watch.attach(self._backend)
        except BaseException:
            self._watch.close()
            raise
        self._closed = False
        self._name = plugin.name
        self._last_drawn: Drawn | None = None  # the batch, of any loader, that the next gather belongs to
        self._evaluating = 0
        self._bar: Progress | None = None
        self._log_handlers: list[logging.Handler] = []
        self._trainer = Trainer(self._backend, self._watch, self._require)
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
        self._closed = self._trainer.closed = True
        for handler in self._log_handlers:
            import logging

            logging.getLogger().removeHandler(handler)
            handler.close()
        try:
            if not failed:
                self._watch.before("leave")  # in debug mode a rank that is still training is told so
            self._backend.close(failed)
        finally:
            self._watch.close(failed)

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
            if self._bar is not None:
                self._bar.clear()  # the next step brings it back
            builtins.print(*values, **{"flush": True, **how})

    def log(self, *values: object) -> None:
        """A line from any rank, to standard error, with the rank in front."""
        self._say(f"[rank {self.rank}] " + " ".join(map(str, values)))

    def progress(self, loader: Any, label: str = "") -> Progress:
        """A progress bar on rank 0: speed over all ranks, time left, and what you show beside it.

            bar = strategy.progress(loader, f"epoch {epoch}")
            for x, y in bar.over(loader):
                bar.show(loss=step(x, y))

        Where the output is not a terminal, a plain line now and then.
        """
        from unidist.output import Progress

        steps = len(loader) if hasattr(loader, "__len__") else None
        samples = loader.batch.global_batch if hasattr(loader, "batch") else 0
        self._bar = Progress(steps, samples, label=label, active=self.is_main)
        return self._bar

    def metrics(
        self, folder: str | os.PathLike[str], formats: Sequence[str] = ("csv",), *, resume: int | None = None
    ) -> Metrics:
        """Write numbers by step, on rank 0: `metrics.write(step, loss=…)`. Formats: "csv", "jsonl", "tensorboard".

        After a restart the files are continued; with `resume=120` rows after step 120 are dropped first.
        """
        from unidist.output import Metrics

        return Metrics(folder, formats, resume=resume, active=self.is_main)

    def log_to(self, folder: str | os.PathLike[str], level: int = 20) -> None:
        """Send what this process logs by `logging` to `folder/DATE-TIME/rank-N.log`, one folder for all ranks.

        `level` is the lowest that is written; 20 is logging.INFO.
        """
        self._require_open()
        import logging

        from unidist.output import rank_log, stamp

        handler = rank_log(folder, self.rank, stamp(self._collectives.broadcast(time.time(), 0)))
        root = logging.getLogger()
        root.addHandler(handler)
        self._log_handlers.append(handler)
        root.setLevel(min(root.level, level) if root.level else level)

    def _say(self, line: str) -> None:
        sys.stderr.write(line + "\n")  # one write: lines of several processes do not mix
        sys.stderr.flush()

    # -- training --------------------------------------------------------------------------------------------

    def prepare(
        self,
        model: Any,
        optimizer: Any = None,
        *,
        accumulate: int = 1,
        sync_every: int = 1,
        sync_batchnorm: bool = False,
        precision: Literal["bf16", "fp16"] | None = None,
        compression: Compression | None = None,
    ) -> Any:
        """Make the model ready to train: on the device, equal to rank 0's everywhere, gradients averaged.

        `optimizer` is `unidist.SGD`, `Adam`, `AdamW` or a native one that holds the model's parameters. Returns the
        native (model, optimizer), or the model alone when no optimizer was given.

        accumulate      gradients of so many batches make one update, and so does an incomplete group at the end of
                        a pass; the loop does not change
        sync_every      local SGD: ranks go their own ways and average parameters after every so many updates and at
                        the end of a pass; 0 leaves it to your calls of average_gradients and average_parameters
        sync_batchnorm  batch normalisation over the global batch
        precision       "bf16" or "fp16" in the forward pass; the loss is scaled where fp16 needs it
        compression     of gradients on their way: "fp16", "bf16", `unidist.TopK`, `unidist.PowerSGD`
        """
        self._require_open()
        from unidist.optim import OptimizerSpec
        from unidist.same_start import compare_ranks

        settings: dict[str, Any] = {
            "accumulate": accumulate,
            "sync_every": sync_every,
            "sync_batchnorm": sync_batchnorm,
            "precision": precision,
            "compression": compression,
        }
        own = vars(optimizer) if isinstance(optimizer, OptimizerSpec) else self._backend.settings(optimizer)
        compared = {"optimizer": type(optimizer).__name__, **own, **settings}
        notice = compare_ranks(self._backend.state(model), self._backend.to_numpy, self._collectives, compared)
        if notice and self.is_main:
            self._say(f"unidist: {notice}")
        return self._trainer.prepare(model, optimizer, **settings)

    def train_step(
        self,
        model: Any,
        optimizer: Any,
        loss_fn: Callable[..., Any],
        *,
        clip_norm: float | None = None,
        compile: bool = False,
    ) -> Callable[..., Any]:
        """One callable for the whole step: `step(x, y)` computes `loss_fn(model, x, y)`, and trains on it.

        It returns this rank's share of the loss: `strategy.mean` of it is the mean over the global batch, also when
        the ranks' batches differ in size. `compile` hands the model to the framework's compiler.
        """
        self._require_open()
        return self._trainer.train_step(model, optimizer, loss_fn, clip_norm, compile)

    def forward(self, model: Any = None) -> AbstractContextManager[None]:
        """The spelled-out step, first part: compute the loss inside. Name the model when several are prepared."""
        self._require_open()
        return self._trainer.forward(model)

    def backward(self, loss: Any) -> None:
        """The spelled-out step, second part: gradients of the mean over all ranks."""
        self._require_open()
        self._trainer.backward(loss)

    def step(self, optimizer: Any, *, clip_norm: float | None = None) -> bool:
        """The spelled-out step, last part: clip, apply, clear. True when an update was made."""
        self._require_open()
        return self._trainer.step(optimizer, clip_norm)

    def flush(self, model: Any, optimizer: Any, *, clip_norm: float | None = None) -> bool:
        """Make an update of a group that accumulation has begun and not finished, as after `break`; False if none is.

        Every rank calls it. The end of a pass does this by itself.
        """
        self._require_open()
        return self._trainer.flush(model, optimizer, clip_norm)

    def average_gradients(self, model: Any) -> None:
        """Replace every gradient by its mean over ranks, between backward and step: for `prepare(…, sync_every=0)`."""
        self._average(model, "gradients")

    def average_parameters(self, model: Any) -> None:
        """Replace every parameter by its mean over ranks: the end of a stretch of local SGD."""
        self._average(model, "parameters")

    def _average(self, model: Any, what: Literal["gradients", "parameters"]) -> None:
        self._require_open()
        self._require("local_sgd")
        self._watch.before(f"average {what}")
        self._backend.average(model, what)
        if what == "parameters":
            self._trainer.brought_together(model)

    def unwrap(self, model: Any) -> Any:
        """Your own model inside what `prepare` returned."""
        return self._backend.unwrap(model)

    # -- checkpoints -----------------------------------------------------------------------------------------

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        model: Any = None,
        optimizer: Any = None,
        loader: Any = None,
        keep: int | None = None,
        **values: Any,
    ) -> None:
        """Write a checkpoint: a directory of safetensors and JSON, complete or not there at all. Every rank calls it.

        `values` are your own: numbers, strings, lists, dicts. With `keep=3`, `path` is a folder of the last three,
        numbered by updates.
        """
        self._require_open()
        from unidist import saving

        schedule = self._checkpointed(model, optimizer)
        with self._watch.paused():
            saving.save(
                path,
                self._backend,
                self._collectives,
                model=model,
                optimizer=optimizer,
                schedule=schedule,
                loader=loader,
                keep=keep,
                values=values,
            )

    def load(
        self, path: str | os.PathLike[str], *, model: Any = None, optimizer: Any = None, loader: Any = None
    ) -> dict[str, Any]:
        """Go on where `save` was, on this or another number of ranks; returns your own values.

        A folder written with `keep=` is read at its latest. What does not fit raises `CheckpointError`, and changes
        nothing.
        """
        self._require_open()
        from unidist import saving

        schedule = self._checkpointed(model, optimizer)
        with self._watch.paused():
            return saving.load(path, self._backend, model=model, optimizer=optimizer, schedule=schedule, loader=loader)

    def _checkpointed(self, model: Any, optimizer: Any) -> Schedule | None:
        if optimizer is None:
            return None
        if model is None:
            raise UsageError("optimizer= needs model= too: its state is named after the model's parameters")
        self._require("optimizer_state")
        schedule = self._trainer.schedule_of(model, optimizer)
        if schedule.in_group:
            raise StateError(
                "in the middle of an accumulation group its gradients would be lost: save or load after an update, or "
                "call flush(model, optimizer) first, which makes one"
            )
        if schedule.apart:
            raise StateError(
                "between two averages of local SGD every rank has its own parameters: call average_parameters(model)"
            )
        return schedule

    # -- data and evaluation ---------------------------------------------------------------------------------

    def loader(
        self,
        data: Any,
        *,
        per_device_batch: int | None = None,
        global_batch: int | None = None,
        shuffle: bool | None = None,
        seed: int = 0,
        tail: Tail | None = None,
        scale: Scale | None = None,
        prefetch: bool = True,
        keep_float64: bool = False,
        workers: int | None = None,
        pin_memory: bool | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> Any:
        """Batches of this rank's share of `data`, on the device. `data` is one of

        - arrays, .npy paths (read as memory maps), tuples or dicts of them: gathered by index, many batches at once;
        - a data set with `len()` and `[i]`, read by the framework's own loader in `workers` processes;
        - a data loader of the framework, which keeps its batch size, collation and workers, and is given our order;
        - anything else that can be iterated: a stream, of which each rank keeps its part.

        Give one of `per_device_batch` and `global_batch`; `loader.batch` shows the arithmetic. `shuffle` reorders by
        (seed, epoch), the same on every backend and world size. `tail` says what becomes of the last, incomplete
        global batch: "keep" (shared out, weighted by sample count), "pad" (rows that weigh nothing), "drop".
        `scale="linear"` or "sqrt" makes `loader.batch.lr_scale` the factor for a rate tuned on one device.
        """
        self._require_open()
        from unidist.data.factory import make_loader
        from unidist.data.loader import Listener

        return make_loader(
            data,
            self._backend,
            Listener(self._on_batch, self._trainer.on_end),
            self._collectives.all_gather,
            self._require,
            per_device_batch=per_device_batch,
            global_batch=global_batch,
            shuffle=shuffle,
            seed=seed,
            tail=tail,
            scale=scale,
            prefetch=prefetch,
            keep_float64=keep_float64,
            workers=workers,
            pin_memory=pin_memory,
            collate=collate,
        )

    def _on_batch(self, drawn: Drawn, batch: Any) -> None:
        self._last_drawn = drawn  # what gather puts in order
        if not self._evaluating:
            self._trainer.on_batch(drawn, batch)

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
        from unidist.data.order import Epoch

        if not isinstance(drawn.origin, Epoch):
            raise UnsupportedOperation("gather() needs an order of samples, and a stream has none: use all_gather")
        first = 0
        if not isinstance(values, (list, tuple)):
            values, first = [values], drawn.step
        if len(values) != drawn.step + 1 - first:
            raise UsageError(
                f"gather: the loader's last pass handed out {drawn.step + 1} batches, here are {len(values)} results"
            )
        if any(isinstance(each, (dict, list, tuple)) for each in values):
            raise UsageError("gather takes one array or tensor for each batch: gather the parts of a result one by one")
        arrays = [
            self._backend.to_numpy(each) if self._backend.is_tensor(each) else np.asarray(each) for each in values
        ]
        return in_order(arrays, drawn.origin, first, self.rank, self._collectives.all_gather)

    def predict(self, model: Any, loader: Any, function: Callable[..., Any] | None = None) -> np.ndarray[Any, Any]:
        """The model's output for every sample, from all ranks, as one numpy array in data-set order.

        `function(model, batch)` says what to compute; not given, the model is called with the batch, or with its
        first part where the batch is a tuple.
        """

        def apply(batch: Any) -> Any:
            if function is not None:
                return function(model, batch)
            return model(batch[0] if isinstance(batch, (tuple, list)) else batch)

        with self.evaluate(model):
            return self.gather([apply(batch) for batch in loader])

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


def _with_launch_options(plugin: Plugin, given: dict[str, Any]) -> dict[str, Any]:
    """`unidist run --option key=value` arrives in UNIDIST_OPTIONS; a contradiction with the call is refused."""
    if os.environ.get("UNIDIST_BACKEND") != plugin.name or not os.environ.get("UNIDIST_OPTIONS"):
        return given
    launched: dict[str, Any] = json.loads(os.environ["UNIDIST_OPTIONS"])
    for key in [key for key in given if key in launched and launched[key] != given[key]]:
        # As the backend understands them: one value may have two spellings.
        here, there = (registry.build_options(plugin, {**launched, key: each[key]}) for each in (given, launched))
        if here != there:
            raise UsageError(
                f"option {key} is {given[key]!r} in Strategy(…) and {launched[key]!r} in `unidist run --option`: "
                "keep one"
            )
    return launched | given

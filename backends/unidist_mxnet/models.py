"""Gluon models, optimizers and their steps, whatever carries the gradients: what every backend on MXNet shares."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd

from unidist.plugin import (
    Backend,
    CheckpointError,
    Features,
    MicroBatch,
    NativeLoader,
    Pace,
    Reduction,
    StateError,
    UnsupportedOperation,
    Update,
    UsageError,
    World,
    check_tied,
    expect,
)
from unidist_mxnet import loading
from unidist_mxnet.arrays import from_numpy, kind_like, number_like, set_values
from unidist_mxnet.blocks import (
    check_for_workers,
    check_model,
    check_optimizer,
    collect,
    fixed_scales,
    is_deferred,
)
from unidist_mxnet.devices import pick_contexts
from unidist_mxnet.names import portable
from unidist_mxnet.optimized_model import Optimized
from unidist_mxnet.optimizers import from_spec, settings
from unidist_mxnet.prepared_model import Carried, Trained
from unidist_mxnet.protocols import GradientStore, ValueExchange
from unidist_mxnet.splitting import split
from unidist_mxnet.worker_model import UpdatedByWorker


class MxnetModels(Backend):
    """All of the contract but meeting and leaving."""

    framework = "mxnet"

    def __init__(self, world: World, options: Any, device: str | None, devices: int | list[str] = 1) -> None:
        self.world, self.options, self.version = world, options, mx.__version__
        contexts = pick_contexts(device, devices, mx.context.num_gpus(), world)
        self._contexts = [mx.Context(kind, index) for kind, index in contexts]
        self.device, self.devices = ", ".join(map(str, self._contexts)), len(contexts)
        self._trained: weakref.WeakKeyDictionary[Any, Trained] = weakref.WeakKeyDictionary()
        self.pace = Pace(self._wait_for)

    def release(self) -> None:
        """To be called when the ranks part."""
        for prepared in self._trained.values():
            prepared.release()

    def carry_by(self, store: GradientStore, exchange: ValueExchange) -> None:
        """To be called once the ranks have met, before anything below."""
        self.store, self.exchange = store, exchange

    # -- tensors

    def is_tensor(self, value: object) -> bool:
        return isinstance(value, nd.NDArray)

    def to_numpy(self, tensor: nd.NDArray) -> np.ndarray:
        return np.asarray(tensor.asnumpy())

    def from_numpy(self, array: np.ndarray) -> nd.NDArray:
        return from_numpy(array, self._contexts[0])

    # -- collectives

    def all_reduce(self, tensor: nd.NDArray, op: Reduction) -> nd.NDArray:
        return kind_like(tensor, self.exchange.reduce(tensor.asnumpy(), op))

    def all_gather(self, tensor: nd.NDArray) -> list[nd.NDArray]:
        mine = tensor.asnumpy()
        parts = self.exchange.gather(mine.tobytes())
        return [kind_like(tensor, np.frombuffer(part, mine.dtype).reshape(mine.shape)) for part in parts]

    def broadcast(self, tensor: nd.NDArray, source: int) -> nd.NDArray:
        mine = tensor.asnumpy()
        data = self.exchange.broadcast(mine.tobytes(), source)
        return kind_like(tensor, np.frombuffer(data, mine.dtype).reshape(mine.shape))

    def barrier(self) -> None:
        self.exchange.meet()

    # -- models

    def check_prepare(self, model: Any, optimizer: Any) -> None:
        check_model(model)
        if isinstance(self._trained.get(model), Optimized):
            raise StateError(
                "this model was prepared with an optimizer already, and a second one would take its place: go on with "
                "what the first prepare() returned, or make a new model"
            )
        parameters = collect(model)
        if optimizer is not None and all(parameter.grad_req == "null" for parameter in parameters.values()):
            raise UsageError("the model has no parameter that requires a gradient: nothing to optimize")
        native = check_optimizer(optimizer, parameters)
        if optimizer is not None:
            self.check_updates(optimizer, native)

    def check_updates(self, optimizer: Any, native: Any) -> None:
        """Whether who makes the updates can use this optimizer."""
        check_for_workers(optimizer, native, self.world.world_size, self.devices)

    def prepare(self, model: Any, optimizer: Any, features: Features) -> tuple[Any, Any]:
        parameters = collect(model)
        native = check_optimizer(optimizer, parameters)
        for parameter in parameters.values():
            if parameter.list_ctx() != self._contexts:
                parameter.reset_ctx(self._contexts)
        alone = features.local or self.capabilities.lockstep is not True
        divisor = 1 if alone else self.world.world_size
        carried = Carried(parameters, self.store, self.exchange, divisor, features.accumulate)
        trained, optimizer = self.make_trained(carried, optimizer, native)
        self._trained[model] = trained
        if any(is_deferred(parameter) for parameter in parameters.values()):
            self._start_at_first_call(model, trained)
        else:
            self.start_training(trained)
        return model, optimizer

    def make_trained(self, carried: Carried, optimizer: Any, native: Any) -> tuple[Trained, Any]:
        """What trains the model, and the optimizer as the user holds it. `native` is the MXNet optimizer inside
        `optimizer`, None for a spec."""
        if optimizer is None:
            return Trained(carried), None
        trained = UpdatedByWorker(carried)
        optimizers = [from_spec(optimizer) for _ in self._contexts] if native is None else [native]
        trained.use(optimizers)
        return trained, optimizers[0] if native is None else optimizer

    def start_training(self, trained: Trained) -> None:
        """All shapes are known, now or with the first data."""
        trained.start()

    def _optimized(self, model: Any) -> Optimized:
        trained = self._trained[model]
        assert isinstance(trained, Optimized), "a step or a state of its optimizer needs prepare(model, optimizer)"
        return trained

    def _start_at_first_call(self, model: Any, trained: Trained) -> None:
        """Some shapes are known only when data comes. All ranks get there together, and have one model after it."""

        def first(block: Any, inputs: Sequence[Any]) -> None:
            if not trained.started:  # a call may have failed; and MXNet lets no hook detach itself
                with autograd.pause(train_mode=False):
                    block.forward(*inputs)
                    self.start_training(trained)  # not recorded either

        model.register_forward_pre_hook(first)

    def unwrap(self, model: Any) -> Any:
        return model

    def state(self, model: Any) -> Mapping[str, nd.NDArray]:
        check_model(model)
        if model in self._trained:
            self._trained[model].check_started()
            self._trained[model].catch_up()
        nd.waitall()  # see `parameters`
        return {name: one.list_data()[0] for name, one in self._portable(model).items() if not is_deferred(one)}

    def parameters(self, model: Any) -> Mapping[str, nd.NDArray]:
        trained = self._trained[model]
        trained.check_started()
        nd.waitall()  # an operator may still change how weights are laid out, and reading them does not wait for it
        return dict(zip(trained.names, trained.weights[0], strict=True))

    def check_state(self, model: Any, arrays: Mapping[str, np.ndarray], filled: Collection[str]) -> None:
        parameters = self._portable(model)
        check_tied(arrays, parameters)
        fixed = {id(scale) for scale in fixed_scales(model)}
        for name, array in arrays.items():
            if id(parameters[name]) in fixed and not (array == 1).all():
                raise CheckpointError(
                    f"{name} is not all ones, as in the model, which has a BatchNorm(scale=False) there"
                )

    def load_state(self, model: Any, arrays: Mapping[str, np.ndarray]) -> None:
        if model in self._trained:
            self._trained[model].check_assignable()
        parameters = self._portable(model)
        for name, array in arrays.items():
            set_values(parameters[name], array)
        if model in self._trained:
            self._trained[model].values_changed(self.world.rank == 0)

    def _portable(self, model: Any) -> dict[str, Any]:
        parameters = collect(model)
        names = portable(parameters)
        return {names[name]: parameter for name, parameter in parameters.items()}

    def settings(self, optimizer: Any) -> dict[str, object]:
        native = optimizer.optimizer if isinstance(optimizer, gluon.Trainer) else optimizer
        return {"lr": native.lr, **settings(native)} if isinstance(native, mx.optimizer.Optimizer) else {}

    def optimizer_state(self, model: Any, optimizer: Any) -> tuple[dict[str, nd.NDArray], dict[str, Any]]:
        return self._optimized(model).optimizer_state(self.world.rank == 0)

    def load_optimizer_state(
        self, model: Any, optimizer: Any, arrays: Mapping[str, np.ndarray], values: Mapping[str, Any]
    ) -> Callable[[], None]:
        return self._optimized(model).load_optimizer_state(arrays, values, self.world.rank == 0)

    def rng_state(self) -> dict[str, np.ndarray]:
        # MXNet's generators can be seeded, not read. So both this run and a resumed one go on from a drawn seed.
        seed = int(mx.nd.random.randint(0, 2**31 - 1, dtype="int32").asscalar())
        mx.random.seed(seed)
        return {"mxnet": np.array([seed])}

    def load_rng_state(self, arrays: Mapping[str, np.ndarray]) -> Callable[[], None]:
        (seed,) = expect.array("the generator state 'mxnet'", arrays.get("mxnet"), np.int64, (1,)).tolist()
        expect.whole("the generator state 'mxnet'", seed, most=2**31 - 1)
        return lambda: mx.random.seed(seed)

    def clear_gradients(self, model: Any) -> None:
        self._trained[model].forget()

    def keep_gradients(self, model: Any, other: Any) -> AbstractContextManager[None]:
        """`model` is in the middle of a group, and `other` computes a micro-batch inside."""
        mine = self._trained[model]
        theirs = {id(parameter) for parameter in self._trained[other].trainable}
        for name, parameter in zip(mine.names, mine.trainable, strict=True):
            if id(parameter) in theirs:
                raise StateError(
                    f"parameter {name} belongs to two prepared models, and one of them is in the middle of an "
                    "accumulation group: finish it first, or call strategy.flush(model, optimizer)"
                )
        return mine.seen.kept_apart()

    def average(self, model: Any, what: Literal["gradients", "parameters"]) -> None:
        if model not in self._trained:
            raise UsageError("average: this model was not returned by prepare()")
        self._trained[model].average(what, self.world.world_size)

    @contextmanager
    def evaluate(self, model: Any) -> Iterator[None]:
        self._even_out(model)
        with autograd.pause(train_mode=False):
            yield

    def evens_out(self, model: Any) -> bool:
        started = model in self._trained and self._trained[model].started
        return (started and self.capabilities.lockstep is not True) or bool(_statistics(model))

    def _even_out(self, model: Any) -> None:
        """Running statistics differ between ranks and devices, in dist_async all parameters do. Evaluation must not."""
        if model in self._trained and self._trained[model].started:
            self._trained[model].even_out()
        held = _statistics(model)
        if not held or (self.world.world_size == 1 and self.devices == 1):
            return
        values = [parameter.list_data()[0].asnumpy() for parameter in held]
        data = self.exchange.broadcast(b"".join(value.tobytes() for value in values), 0)
        for parameter, value in zip(held, values, strict=True):
            part, data = data[: value.nbytes], data[value.nbytes :]
            set_values(parameter, np.frombuffer(part, value.dtype).reshape(value.shape))

    # -- a training step

    def forward(self, model: Any, micro: MicroBatch) -> AbstractContextManager[None]:
        self.pace.keep()
        self._trained[model].open()
        recorded: AbstractContextManager[None] = autograd.record()
        return recorded

    def backward(self, model: Any, loss: nd.NDArray, micro: MicroBatch) -> None:
        self._trained[model].backward([loss], [1.0], micro)
        self._trained[model].seen.before_update()
        self.pace.told(loss.detach())

    def apply(self, model: Any, optimizer: Any, update: Update) -> float | nd.NDArray:
        with self.translated("the step"):
            return self._optimized(model).apply(update)

    def _wait_for(self, losses: list[nd.NDArray]) -> None:
        with self.translated("the step"):
            for loss in losses:  # of several models, which do not wait for each other
                loss.wait_to_read()

    def translated(self, what: str) -> AbstractContextManager[None]:
        """Inside, something is waited for that other ranks take part in."""
        return nullcontext()

    def train_step(
        self, model: Any, optimizer: Any, loss_fn: Callable[..., nd.NDArray], compile: bool
    ) -> Callable[[Sequence[Any], MicroBatch, Update | None], tuple[nd.NDArray, float | nd.NDArray]]:
        if compile:
            if not isinstance(model, mx.gluon.HybridBlock):
                raise UsageError(f"compile=True hybridizes, and {type(model).__name__} is no gluon.HybridBlock")
            model.hybridize()
        trained, first = self._trained[model], self._contexts[0]

        def run(
            batch: Sequence[Any], micro: MicroBatch, update: Update | None
        ) -> tuple[nd.NDArray, float | nd.NDArray]:
            if self.devices > 1 and micro.told and not micro.summed:
                raise UnsupportedOperation(
                    f"the batch is split over {self.devices} devices, and weight= does not say what each part weighs: "
                    "use reduction='sum', or a process for each device"
                )
            self.pace.keep()
            trained.send_weight(micro)
            with self.forward(model, micro):
                parts = [(1.0, batch)] if self.devices == 1 else split(batch, self._contexts)
                losses = [(1.0 if micro.summed else share, loss_fn(model, *part)) for share, part in parts]
            trained.backward([loss for _, loss in losses], [share for share, _ in losses], micro)
            mean_weight = 1.0 if update is None else self.apply(model, optimizer, update)
            if self.devices == 1:
                loss = losses[0][1].detach()
            else:
                loss = sum(loss.as_in_context(first) * share for share, loss in losses)
            self.pace.told(loss)
            return loss, mean_weight if isinstance(mean_weight, float) else number_like(loss, mean_weight)

        return run

    # -- the framework's own data loaders

    def open_loader(self, loader: object) -> NativeLoader | None:
        return loading.open_loader(loader)

    def read_batches(self, source: NativeLoader, batches: Any) -> AbstractContextManager[Iterator[Any]]:
        return loading.read_batches(source, batches, self._contexts[0])


def _statistics(model: Any) -> list[Any]:
    return [
        parameter
        for parameter in collect(model).values()
        if parameter.grad_req == "null" and not is_deferred(parameter)
    ]

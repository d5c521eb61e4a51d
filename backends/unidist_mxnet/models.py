"""Gluon models, optimizers and their steps, whatever carries the gradients: what every backend on MXNet shares."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd

from unidist import Backend, Features, Update, World
from unidist.backend import Reduction
from unidist.data.source import OwnLoader
from unidist.errors import StateError, UsageError
from unidist_mxnet import loading
from unidist_mxnet.arrays import from_numpy, kind_like, set_values
from unidist_mxnet.blocks import check_for_workers, check_model, check_optimizer, collect, is_deferred, split
from unidist_mxnet.carriers import GradientStore, ValueExchange
from unidist_mxnet.devices import pick_contexts
from unidist_mxnet.optimizers import from_spec, settings
from unidist_mxnet.trained import Trained, UpdatedByWorker


class MxnetModels(Backend):
    """All of the contract but meeting and leaving."""

    framework = "mxnet"

    def __init__(self, world: World, options: Any, device: str | None, devices: int | list[str] = 1) -> None:
        self.world, self.options, self.version = world, options, mx.__version__
        contexts = pick_contexts(device, devices, mx.context.num_gpus(), world)
        self._contexts = [mx.Context(kind, index) for kind, index in contexts]
        self.device, self.devices = ", ".join(map(str, self._contexts)), len(contexts)
        self._trained: weakref.WeakKeyDictionary[Any, Trained] = weakref.WeakKeyDictionary()

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
        return [kind_like(tensor, np.frombuffer(each, mine.dtype).reshape(mine.shape)) for each in parts]

    def broadcast(self, tensor: nd.NDArray, source: int) -> nd.NDArray:
        mine = tensor.asnumpy()
        data = self.exchange.broadcast(mine.tobytes(), source)
        return kind_like(tensor, np.frombuffer(data, mine.dtype).reshape(mine.shape))

    def barrier(self) -> None:
        self.exchange.meet()

    # -- models

    def prepare(self, model: Any, optimizer: Any, features: Features) -> tuple[Any, Any]:
        check_model(model)
        if model in self._trained and self._trained[model].optimized:
            raise StateError(
                "this model was prepared with an optimizer already, and a second one would take its place: go on with "
                "what the first prepare() returned, or make a new model"
            )
        parameters = collect(model)
        trainable = [each for each in parameters.values() if each.grad_req != "null"]
        if optimizer is not None and not trainable:
            raise UsageError("the model has no parameter that requires a gradient: nothing to optimize")
        native = check_optimizer(optimizer, parameters)
        for each in parameters.values():
            if each.list_ctx() != self._contexts:
                each.reset_ctx(self._contexts)
        alone = features.local or self.capabilities.lockstep is not True
        carried = (parameters, self.store, self.exchange, 1 if alone else self.world.world_size)
        trained, optimizer = self.make_trained(carried, optimizer, native)
        self._trained[model] = trained
        if any(is_deferred(each) for each in parameters.values()):
            self._start_at_first_call(model, trained)
        else:
            self.start_training(trained)
        return model, optimizer

    def make_trained(self, carried: tuple[Any, ...], optimizer: Any, native: Any) -> tuple[Trained, Any]:
        """What trains the model, and the optimizer as the user holds it. `carried` is what a Trained is made of,
        `native` the mx.optimizer one inside `optimizer`, None for a spec."""
        if optimizer is None:
            return Trained(*carried), None
        check_for_workers(optimizer, native, self.world.world_size, self.devices)
        trained = UpdatedByWorker(*carried)
        each = [from_spec(optimizer) for _ in self._contexts] if native is None else [native]
        trained.use(each)
        return trained, each[0] if native is None else optimizer

    def start_training(self, trained: Trained) -> None:
        """All shapes are known, now or with the first data."""
        trained.start()

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
        return {name: each.list_data()[0] for name, each in collect(model).items() if not is_deferred(each)}

    def load_state(self, model: Any, arrays: Mapping[str, np.ndarray]) -> None:
        parameters = collect(model)
        for name, array in arrays.items():
            set_values(parameters[name], array)
        if model in self._trained:
            self._trained[model].values_changed(self.world.rank == 0)

    def settings(self, optimizer: Any) -> dict[str, object]:
        native = optimizer.optimizer if isinstance(optimizer, gluon.Trainer) else optimizer
        return {"lr": native.lr, **settings(native)} if isinstance(native, mx.optimizer.Optimizer) else {}

    def optimizer_state(self, model: Any, optimizer: Any) -> tuple[dict[str, nd.NDArray], dict[str, Any]]:
        return self._trained[model].optimizer_state()

    def load_optimizer_state(
        self, model: Any, optimizer: Any, arrays: Mapping[str, np.ndarray], values: Mapping[str, Any]
    ) -> None:
        self._trained[model].load_optimizer_state(arrays, values)

    def rng_state(self) -> dict[str, np.ndarray]:
        # MXNet's generators can be seeded, not read. So both this run and a resumed one go on from a drawn seed.
        seed = int(mx.nd.random.randint(0, 2**31 - 1, dtype="int32").asscalar())
        mx.random.seed(seed)
        return {"mxnet": np.array([seed])}

    def load_rng_state(self, arrays: Mapping[str, np.ndarray]) -> None:
        if "mxnet" in arrays:
            mx.random.seed(int(arrays["mxnet"][0]))

    def clear_gradients(self, model: Any) -> None:
        trained = self._trained[model]
        if trained.adding and trained.started:  # else the next backward overwrites them
            trained.clear()

    def average(self, model: Any, what: Literal["gradients", "parameters"]) -> None:
        if model not in self._trained:
            raise UsageError("average: this model was not returned by prepare()")
        self._trained[model].average(what, self.world.world_size)

    @contextmanager
    def evaluate(self, model: Any) -> Iterator[None]:
        self._even_out(model)
        with autograd.pause(train_mode=False):
            yield

    def _even_out(self, model: Any) -> None:
        """Running statistics differ between ranks and devices, in dist_async all parameters do. Evaluation must not."""
        if model in self._trained and self._trained[model].started:
            self._trained[model].even_out()
        held = [each for each in collect(model).values() if each.grad_req == "null" and not is_deferred(each)]
        if not held or (self.world.world_size == 1 and self.devices == 1):
            return
        values = [each.list_data()[0].asnumpy() for each in held]
        data = self.exchange.broadcast(b"".join(value.tobytes() for value in values), 0)
        for each, value in zip(held, values, strict=True):
            own, data = data[: value.nbytes], data[value.nbytes :]
            set_values(each, np.frombuffer(own, value.dtype).reshape(value.shape))

    # -- a training step

    def forward(self, model: Any, sync: bool) -> AbstractContextManager[None]:
        self._trained[model].open(sync)
        return autograd.record()

    def backward(self, model: Any, loss: nd.NDArray, weight: float) -> None:
        self._trained[model].backward([loss], [weight])

    def apply(self, model: Any, optimizer: Any, update: Update) -> None:
        self._trained[model].apply(update)

    def train_step(
        self, model: Any, optimizer: Any, loss_fn: Callable[..., nd.NDArray], compile: bool
    ) -> Callable[[Sequence[Any], float, bool, Update | None], nd.NDArray]:
        if compile:
            if not isinstance(model, mx.gluon.HybridBlock):
                raise UsageError(f"compile=True hybridizes, and {type(model).__name__} is no gluon.HybridBlock")
            model.hybridize()
        if self.devices == 1:
            return super().train_step(model, optimizer, loss_fn, compile)
        trained = self._trained[model]

        def run(batch: Sequence[Any], weight: float, sync: bool, update: Update | None) -> nd.NDArray:
            trained.open(sync)
            with autograd.record():
                parts = [(share, loss_fn(model, *part)) for share, part in split(batch, self._contexts)]
            trained.backward([loss for _, loss in parts], [weight * share for share, _ in parts])
            if update is not None:
                trained.apply(update)
            first = self._contexts[0]
            return sum(loss.as_in_context(first) * share for share, loss in parts)

        return run

    # -- the framework's own data loaders

    def open_loader(self, loader: object) -> OwnLoader | None:
        return loading.open_loader(loader)

    def read_batches(self, source: OwnLoader, batches: Any) -> AbstractContextManager[Iterator[Any]]:
        return loading.read_batches(source, batches, self._contexts[0])

"""One prepared model: its parameters, their keys in the store, and how gradients become an update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd, nd

from unidist.backend import Update
from unidist.errors import StateError, UsageError
from unidist_mxnet.arrays import set_values
from unidist_mxnet.carriers import GradientStore, ValueExchange
from unidist_mxnet.optimizers import set_rate
from unidist_mxnet.saved import restore_state, saved_state


class Trained:
    """Gradients are the mean over ranks as soon as `backward` has synchronised them: losses are divided beforehand,
    so that the sum, which is all a KVStore knows, is the mean."""

    optimized = False  # there is an optimizer

    def __init__(self, parameters: dict[str, Any], store: GradientStore, exchange: ValueExchange, divisor: int) -> None:
        names = {id(each): name for name, each in reversed(parameters.items())}  # a shared one counts once
        self.parameters = [each for name, each in parameters.items() if names[id(each)] == name]
        self.trainable = [each for each in self.parameters if each.grad_req != "null"]
        self.names = [names[id(each)] for each in self.trainable]
        self._requested = [(names[id(each)], each, each.grad_req == "null") for each in self.parameters]
        self._store, self._exchange, self._divisor = store, exchange, divisor
        self._heads: dict[Any, nd.NDArray] = {}
        self.sync, self.started = True, False
        self.adding = any(each.grad_req == "add" for each in self.trainable)

    # -- the start ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """All parameters have their shapes now: make every rank equal to rank 0 and give the store its keys."""
        store = self._store
        if store.rounds_dtypes:
            for each in self.trainable:
                if each.dtype not in (np.float32, np.float16, "float32", "float16"):
                    raise UsageError(
                        f"parameter {each.name} is {np.dtype(each.dtype)}, which a distributed KVStore rounds to "
                        "float32 without a word: call model.cast('float32') first"
                    )
        plain = [each for each in self.parameters if np.dtype(each.dtype) == np.float32] if store.rank_0_leads else []
        for each in self.parameters:
            if each not in plain:
                value = each.list_data()[0].asnumpy()
                value = np.frombuffer(self._exchange.broadcast(value.tobytes(), 0), value.dtype).reshape(value.shape)
                set_values(each, value)
        rest = [each for each in plain if each.grad_req == "null"]
        self.keys = store.keys(self.names)
        frozen = store.keys([each.name for each in rest])
        self.take_arrays()
        if store.kv is not None and self.parameters:
            self.before_start()
            first = [each.list_data()[0] for each in self.trainable + rest]
            store.start(self.keys + frozen, first, [each.list_data() for each in self.trainable + rest])
        if self.adding:
            self.clear()
        self.started = True

    def check_started(self) -> None:
        if not self.started:
            raise StateError(
                "some of the model's shapes are not known yet, so its ranks are not equal: call the model itself, not "
                "its layers, with a batch on every rank, before anything else is done with it"
            )

    @property
    def bytes(self) -> int:
        return sum(each.list_data()[0].size * np.dtype(each.dtype).itemsize for each in self.parameters)

    def before_start(self) -> None:
        """The servers can be told something before the first value reaches them."""

    def values_changed(self, rank_0: bool) -> None:
        """The model was given other values, the same on every rank."""

    def catch_up(self) -> None:
        """Get what servers hold, where others may have changed it; no other rank is needed for that."""

    def even_out(self) -> None:
        """Make the parameters of all ranks equal, where a step may leave them different."""

    def take_arrays(self) -> None:
        """weights[device][n] and gradients[device][n]; asking Gluon in each step would cost more than the update. Those
        of mx.np come as the mx.nd arrays that share their memory, which all operators take."""
        weights = [[array.as_nd_ndarray() for array in each.list_data()] for each in self.trainable]
        gradients = [[array.as_nd_ndarray() for array in each.list_grad()] for each in self.trainable]
        self.weights = [list(each) for each in zip(*weights, strict=True)]
        self.gradients = [list(each) for each in zip(*gradients, strict=True)]
        self._by_key = [list(each) for each in zip(*self.gradients, strict=True)]

    # -- gradients ---------------------------------------------------------------------------------------------

    def open(self, sync: bool) -> None:
        """A loss is about to be computed. The first time that a gradient has to wait for others, let them add up."""
        self.sync = sync
        for name, each, frozen in self._requested:
            if (each.grad_req == "null") is not frozen:
                raise StateError(
                    f"parameter {name} was {'unfrozen' if frozen else 'frozen'} after prepare(), which has settled "
                    "what is trained and exchanged: set grad_req before it. In the middle of a training, save, prepare "
                    "a new model and load"
                )
        if not sync and not self.adding:
            self.adding = True
            for each in self.trainable:
                each.grad_req = "add"  # makes new gradient arrays, which are zero
            if self.started:
                self.take_arrays()

    def backward(self, losses: Sequence[nd.NDArray], weights: Sequence[float]) -> None:
        self.check_started()
        autograd.backward(list(losses), [self._head(*each) for each in zip(losses, weights, strict=True)])
        if not self.adding:
            self._drop_stale()
        if self.sync:
            self.exchange_gradients()

    def exchange_gradients(self) -> None:
        """Sum them over the ranks, in place; returns before it is done, as all of MXNet."""
        if self._store.kv is not None:
            self._store.sum_gradients(self.keys, self._by_key)

    def average(self, what: str, size: int) -> None:
        """The mean over ranks, in place."""
        arrays = self.weights
        if what == "gradients":
            arrays, size = self.gradients, size // self._divisor  # they may have been divided already
            if not self.sync and len(arrays) > 1:
                self._sum_over_devices()
            self.sync = True
        if self._store.workers == 1:
            return
        nd.waitall()  # copies are summed below, and nothing else would order that after other sums of these keys
        for n, (key, first) in enumerate(zip(self.keys, arrays[0], strict=True)):
            mean = first.copy()
            self._store.sum(key, mean, -n, self._exchange)
            mean /= size
            for device in arrays:
                mean.copyto(device[n])

    def _sum_over_devices(self) -> None:
        """The store does it otherwise; it is not asked in local SGD, nor when an average is called for by hand."""
        for gradients in self._by_key:
            for other in gradients[1:]:
                gradients[0] += other.as_in_context(gradients[0].context)
            for other in gradients[1:]:
                gradients[0].copyto(other)

    def _head(self, loss: nd.NDArray, weight: float) -> nd.NDArray:
        weight /= self._divisor
        key = (weight, loss.context, loss.shape, loss.dtype)
        if key not in self._heads:
            if len(self._heads) > 100:
                self._heads.clear()
            head = mx.nd.full(loss.shape, weight, loss.context, dtype=loss.dtype) if loss.shape else None
            if head is None:  # a number of mx.np, which mx.nd cannot make
                head = mx.np.full((), weight, dtype=loss.dtype, ctx=loss.context)
            self._heads[key] = head if type(head) is type(loss) else head.as_np_ndarray()
        return self._heads[key]

    def _drop_stale(self) -> None:
        """A parameter that this loss did not touch still holds the gradient of an earlier one."""
        for weights, gradients in zip(self.weights, self.gradients, strict=True):
            for weight, gradient in zip(weights, gradients, strict=True):
                if weight._fresh_grad:
                    weight._fresh_grad = False
                else:
                    gradient[:] = 0

    def clear(self) -> None:
        for gradients in self.gradients:
            nd.reset_arrays(*gradients, num_arrays=len(gradients))


class UpdatedByWorker(Trained):
    """Every worker makes the same update to its own copy."""

    optimized = True

    def use(self, optimizers: list[mx.optimizer.Optimizer]) -> None:
        """One for each device, or one for all."""
        self._optimizers = optimizers
        self._scale = optimizers[0].rescale_grad
        self._indices = list(range(len(self.trainable)))
        for each in optimizers:
            each.param_dict = dict(enumerate(self.trainable))  # for their lr_mult and wd_mult
        contexts = self.trainable[0].list_ctx()
        shared = optimizers if len(optimizers) == len(contexts) else optimizers * len(contexts)
        self.updaters = [mx.optimizer.get_updater(each) for each in shared]

    def apply(self, update: Update) -> None:
        if not self.sync and len(self.gradients) > 1:
            self._sum_over_devices()
        scale = self._scale * update.rescale
        if update.clip_norm is not None:
            squares = nd.multi_sum_sq(*self.gradients[0], num_arrays=len(self.gradients[0]))
            norm = abs(scale) * float(squares.sum().asscalar()) ** 0.5
            scale *= min(1.0, update.clip_norm / (norm + 1e-6))
        first = self._optimizers[0]
        if update.lr is not None:
            set_rate(first, update.lr)
        for each in self._optimizers:
            each.rescale_grad = scale
            if each is not first:
                set_rate(each, first.lr)
        for updater, weights, gradients in zip(self.updaters, self.weights, self.gradients, strict=True):
            updater(self._indices, gradients, weights)
        if self.adding:
            self.clear()

    def optimizer_state(self) -> tuple[dict[str, nd.NDArray], dict[str, Any]]:
        return saved_state(self.updaters[0], self.names)

    def load_optimizer_state(self, arrays: Mapping[str, np.ndarray], values: Mapping[str, Any]) -> None:
        for updater, weights in zip(self.updaters, self.weights, strict=True):
            restore_state(updater, self.names, weights, arrays, values)

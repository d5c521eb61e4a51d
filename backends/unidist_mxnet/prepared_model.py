"""One prepared model: its parameters, their keys in the store, and how gradients become an update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from mxnet import autograd, nd

from unidist.plugin import MicroBatch, StateError, Update, UsageError
from unidist_mxnet.arrays import in_default_layout, number_like, set_values
from unidist_mxnet.fused import Sums, clear
from unidist_mxnet.names import portable
from unidist_mxnet.protocols import GradientStore, ValueExchange
from unidist_mxnet.riding import NOTHING, Carriers, rider
from unidist_mxnet.seen_gradients import SeenGradients
from unidist_mxnet.watched import watch

CHANGED = (
    "the gradients were changed between backward and step, as by clipping, and they are not what the update is made of "
    "yet: they are still to be {}. Use strategy.step(optimizer, clip_norm=…){}"
)


class Carried(NamedTuple):
    """What a prepared model is made of."""

    parameters: dict[str, Any]
    store: GradientStore
    exchange: ValueExchange
    divisor: int  # the ranks whose gradients are averaged
    accumulate: bool


class Trained:
    """Losses are divided by the number of ranks beforehand, so that the sum of the gradients, which is all a KVStore
    knows, is their mean. By the mean weight of the ranks it is divided in `apply`."""

    weight_rides = True  # the gradients can be divided by the mean weight after the exchange

    def __init__(self, carried: Carried) -> None:
        parameters = carried.parameters
        names = {id(parameter): name for name, parameter in reversed(parameters.items())}  # a shared one counts once
        self.parameters = [parameter for name, parameter in parameters.items() if names[id(parameter)] == name]
        self.trainable = [parameter for parameter in self.parameters if parameter.grad_req != "null"]
        self.names = [names[id(parameter)] for parameter in self.trainable]
        renamed = portable(parameters)
        self.saved_names = [renamed[name] for name in self.names]
        self._requested = [
            (names[id(parameter)], parameter, parameter.grad_req == "null") for parameter in self.parameters
        ]
        self._store, self._exchange, self._divisor = carried.store, carried.exchange, carried.divisor
        self._heads: dict[Any, nd.NDArray] = {}
        self.sync, self.started, self.disturbed, self.released = True, False, False, False
        self._weight = 0.0  # of this group so far
        self._sent = False  # ... to be summed up over the ranks, or put behind the gradient that it rides on
        self._rider: int | None = None
        self._carriers: Carriers | None = None  # of the rider
        self._accumulate = carried.accumulate
        self._sums: Sums | None = None  # of the micro-batches of this group so far
        self.seen = SeenGradients()
        self._averaging = False  # copies are being summed under the keys of the gradients
        self._places = {id(parameter): n for n, parameter in enumerate(self.trainable)}
        for parameter in self.parameters:
            watch(parameter, self)

    # -- the start ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """All parameters have their shapes now: make every rank equal to rank 0 and give the store its keys."""
        store = self._store
        if store.rounds_dtypes:
            for parameter in self.trainable:
                if parameter.dtype not in (np.float32, np.float16, "float32", "float16"):
                    raise UsageError(
                        f"parameter {parameter.name} is {np.dtype(parameter.dtype)}, which a distributed KVStore "
                        "rounds to float32 without a word: call model.cast('float32') first"
                    )
        plain = (
            [parameter for parameter in self.parameters if np.dtype(parameter.dtype) == np.float32]
            if store.rank_0_leads
            else []
        )
        for parameter in self.parameters:
            if parameter not in plain:
                value = parameter.list_data()[0].asnumpy()
                value = np.frombuffer(self._exchange.broadcast(value.tobytes(), 0), value.dtype).reshape(value.shape)
                set_values(parameter, value)
        rest = [parameter for parameter in plain if parameter.grad_req == "null"]
        self.keys = store.keys(self.names)
        frozen = store.keys([parameter.name for parameter in rest])
        if self.weight_rides and self._divisor > 1 and not store.compressed:
            self._rider = rider(self.trainable)
        self._weight_key = store.keys(["weights" if self._rider is None else self.names[self._rider]])[0]
        self._mean_weights = [nd.zeros(1)]
        if self._rider is not None:
            self._carriers = Carriers(self.trainable[self._rider])
            self._mean_weights = self._carriers.numbers
        self.take_arrays()
        if store.kv is not None and self.parameters:
            self.before_start()
            nd.waitall()  # an operator may queue another that changes a layout
            first = [in_default_layout(parameter.list_data()[0]) for parameter in self.trainable + rest]
            store.start(self.keys + frozen, first, [parameter.list_data() for parameter in self.trainable + rest])
            if self.trainable:
                store.start_sum(self._weight_key, self._carriers.arrays[0] if self._carriers else nd.zeros(1))
        self.clear()
        self.started, self.disturbed = True, False

    def check_started(self) -> None:
        if not self.started:
            raise StateError(
                "some of the model's shapes are not known yet, so its ranks are not equal: call the model itself, not "
                "its layers, with a batch on every rank, before anything else is done with it"
            )

    @property
    def bytes(self) -> int:
        return sum(parameter.list_data()[0].size * np.dtype(parameter.dtype).itemsize for parameter in self.parameters)

    def before_start(self) -> None:
        """The servers can be told something before the first value reaches them."""

    def check_assignable(self) -> None:
        """Refuse, before the model is given other values, where these could not be carried on."""

    def values_changed(self, rank_0: bool) -> None:
        """The model was given other values, the same on every rank."""

    def value_set(self, parameter: Any) -> None:
        """The user called set_data()."""

    def release(self) -> None:
        """The Strategy is closed: what was the user's is the user's again."""
        self.released = True

    def catch_up(self) -> None:
        """Get what servers hold, where others may have changed it; no other rank is needed for that."""

    def even_out(self) -> None:
        """Make the parameters of all ranks equal, where a step may leave them different."""

    def take_arrays(self) -> None:
        """weights[device][n] and gradients[device][n]; asking Gluon in each step would cost more than the update. Those
        of mx.np come as the mx.nd arrays that share their memory, which all operators take."""
        weights = [[array.as_nd_ndarray() for array in parameter.list_data()] for parameter in self.trainable]
        gradients = [[array.as_nd_ndarray() for array in parameter._grad] for parameter in self.trainable]
        self.weights = [list(copies) for copies in zip(*weights, strict=True)]
        self.gradients = [list(copies) for copies in zip(*gradients, strict=True)]
        self._by_key = self.seen.arrays = gradients
        self._taken = [
            parameter._grad for parameter in self.trainable
        ]  # Gluon makes another list when it makes other arrays
        keys, sent = list(self.keys), list(gradients)
        if self._rider is not None and self._carriers is not None:
            keys[self._rider], sent[self._rider] = self._weight_key, self._carriers.arrays
        if self._store.kv is not None:
            self.send = self.sending(keys, sent)

    def sending(self, keys: list[int], gradients: list[list[nd.NDArray]]) -> Callable[[], None]:
        """What sends the gradients whenever it is called, and receives what is made of them."""
        return self._store.summing(keys, gradients)

    # -- gradients ---------------------------------------------------------------------------------------------

    def open(self) -> None:
        """A loss is about to be computed."""
        if self.disturbed:
            self.settle()

    def settle(self) -> None:
        """Some parameter was made anew, frozen or unfrozen: refuse what would train wrongly, and take the rest."""
        for name, parameter, frozen in self._requested:
            if (parameter.grad_req == "null") is not frozen:
                raise StateError(
                    f"parameter {name} was {'unfrozen' if frozen else 'frozen'} after prepare(), which has settled "
                    "what is trained and exchanged: set grad_req before it. In the middle of a training, save, prepare "
                    "a new model and load"
                )
        if self.started:
            then = [(array.shape, array.dtype, array.context) for device in self.weights for array in device]
            nd.waitall()  # the engine orders what is sent under one key by its array, and here come other arrays
            self.take_arrays()
            if then != [(array.shape, array.dtype, array.context) for device in self.weights for array in device]:
                raise StateError(
                    "a parameter was given another type or device after prepare(): do that before it, or prepare a "
                    "new model"
                )
        self.disturbed = False

    def send_weight(self, micro: MicroBatch) -> None:
        """Send it as soon as it is known, so that nothing has to wait for it later."""
        if not (micro.sync and self.started) or self._sent:
            return
        share = max(self._weight + micro.weight, NOTHING) / self._divisor
        if self._rider is not None:
            for n, weight in enumerate(self._mean_weights):
                weight[:] = 0 if n else share  # devices are summed up, too
        elif not micro.summed:
            # Always the same array: so the engine sends one after the other.
            (mean,) = self._mean_weights
            mean[:] = share
            self._store.sum(self._weight_key, mean, 1, self._exchange)
        self._sent = True

    def backward(self, losses: Sequence[nd.NDArray], shares: Sequence[float], micro: MicroBatch) -> None:
        """Each device has a loss, and a share of the micro-batch."""
        self.check_started()
        self._check_graph()
        self.send_weight(micro)
        self.seen.look_for_changes()
        self.sync = micro.sync
        self._weight += micro.weight
        self.clear()  # now: whatever else has computed gradients did so before, and adds nothing to the step
        if micro.weight:  # 0 times a loss that is not a number would not be 0
            heads = [self._head(loss, micro.weight * share) for loss, share in zip(losses, shares, strict=True)]
            autograd.backward(list(losses), heads)
        if micro.sync:
            if self._sums is not None:
                self._sums.move_to(self.gradients)
            self.exchange_gradients()
        elif self._accumulate:
            if self._sums is None:
                self._sums = Sums(self.gradients)
            self._sums.add(self.gradients)
            self.seen.wait()

    def complete(self) -> None:
        """The gradients of the group are to be used: those that wait are put back."""
        self.seen.look_for_changes()
        if self._sums is not None and not self._sums.empty:
            self.clear()
            self._sums.move_to(self.gradients)

    def _check_graph(self) -> None:
        """The loss was computed by the parameters that are there now: its gradients go to no other arrays."""
        if self.disturbed:
            taken = self._taken
            self.settle()
            if any(now is not then for now, then in zip(self._taken, taken, strict=True)):
                raise StateError(
                    "a parameter was made anew between forward and backward, as by cast(), reset_ctx() or "
                    "initialize(): do that between two steps"
                )

    def _head(self, loss: nd.NDArray, weight: float) -> nd.NDArray:
        """What the loss is multiplied by. The gradients are divided by the mean weight when it has come with them."""
        weight /= self._divisor
        key = (weight, loss.context, loss.shape, loss.dtype, type(loss))
        if key not in self._heads:
            if len(self._heads) > 100:
                self._heads.clear()
            self._heads[key] = number_like(loss, nd.full(1, weight))
        return self._heads[key]

    def rescale(self, update: Update) -> tuple[float, float | nd.NDArray]:
        """What to multiply the gradients by, and the mean weight; as an array, it is still to divide them, and to read
        it would keep the host from queueing what follows. They are complete now."""
        self._weight, self._sent = 0.0, False
        changed = self.seen.take_changes()
        rescale, mean = self._rescale(update)
        if changed:
            there = float(mean.asscalar()) if isinstance(mean, nd.NDArray) else mean
            if not self.weight_rides and self._divisor > 1:
                raise StateError(CHANGED.format("summed up on the servers", ", or update_on='worker'"))
            if rescale != 1.0 or abs(there - 1.0) >= 1e-6:
                raise StateError(CHANGED.format("scaled to the weight of all batches", ", or batches of equal size"))
        return rescale, mean

    def _rescale(self, update: Update) -> tuple[float, float | nd.NDArray]:
        if update.rescale is not None:
            return update.rescale, 1.0
        if self._rider is not None and update.clip_norm is None:
            return 1.0, self._mean_weights[0]  # until the next step
        mean = float(self._mean_weights[0].asscalar())
        mean = 1.0 if abs(mean - 1.0) < 1e-6 else mean  # a third and a third and a third
        return 1.0 / mean if mean > 2 * NOTHING else 1.0, mean

    def gradient_shown(self, parameter: Any) -> None:
        """Somebody asked Gluon for this gradient, and can write to it from now on: zero_grad() does."""
        place = self._places.get(id(parameter))
        if place is not None and self.started:
            self.seen.add(place)

    def forget(self) -> None:
        """What is left of a group that an error has ended."""
        self._weight, self._sent = 0.0, False
        self.seen.forget()
        if self._sums is not None:
            self._sums.empty = True

    def exchange_gradients(self) -> None:
        """Sum them over the ranks, in place; returns before it is done, as all of MXNet."""
        if self._store.kv is None:
            return
        if self._averaging:
            nd.waitall()  # for the reason given in `average`; a gradient that depends on no weight does not wait
            self._averaging = False
        if self._rider is None or self._carriers is None:
            self.send()
        else:
            self._carriers.load(self._by_key[self._rider])
            self.send()
            self._carriers.unload(self._by_key[self._rider])

    def average(self, what: str, size: int) -> None:
        """The mean over ranks, in place."""
        arrays = self.weights
        if what == "gradients":
            self.complete()
            if self.sync and self._divisor > 1:
                return  # they are
            arrays, size = self.gradients, size // self._divisor  # they may have been divided already
            if not self.sync and len(arrays) > 1:
                self._sum_over_devices()
            self.sync = True
        if self._store.workers == 1:
            return
        nd.waitall()  # copies are summed below, and nothing else would order that after other sums of these keys
        for n, (key, first) in enumerate(zip(self.keys, arrays[0], strict=True)):
            mean = in_default_layout(first).copy()
            self._store.sum(key, mean, -n, self._exchange)
            mean /= size
            for device in arrays:
                mean.copyto(device[n])
        self._averaging = True

    def _sum_over_devices(self) -> None:
        """The store does it otherwise; it is not asked in local SGD, nor when an average is called for by hand."""
        for gradients in self._by_key:
            for other in gradients[1:]:
                gradients[0] += other.as_in_context(gradients[0].context)
            for other in gradients[1:]:
                gradients[0].copyto(other)

    def clear(self) -> None:
        """So a parameter that the next loss does not touch has no gradient of an earlier one."""
        clear(self.gradients)

"""A prepared model whose parameters and optimizer live on the servers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import nd

from unidist.plugin import MicroBatch, StateError, UnsupportedOperation, Update
from unidist_mxnet.arrays import in_default_layout
from unidist_mxnet.optimized_model import Optimized
from unidist_mxnet.optimizer_state import Saved, checked, described, is_sgd, state_arrays
from unidist_mxnet.optimizers import set_rate, settings
from unidist_mxnet.prepared_model import Carried
from unidist_mxnet.store import Store
from unidist_mxnet.watched import guard


class UpdatedByServer(Optimized):
    """The servers hold the parameters and the optimizer. Workers send gradients and get parameters back."""

    weight_rides = False  # the sum of the gradients is not seen again

    _store: Store  # no other carrier has servers

    def __init__(self, carried: Carried, store: Store, asynchronous: bool) -> None:
        super().__init__(carried._replace(store=store))
        self._asynchronous = asynchronous
        self._updates, self._pushed = 0, 0  # by this worker; a rank without a sample does not push in dist_async
        self._counted: dict[str, int] = {}  # updates of each parameter before a resume
        self._filled: set[str] = set()  # parameters whose state came from a checkpoint
        self._inside: dict[str, float] = {}  # the rate in the momentum: the last but 0 that moved a parameter
        self._told_inside: float | None = None  # ... where it is the same for all
        self._slots_per_parameter: int | None = None
        self._weighs = False  # whether any sample is in the gradient
        self._set: str | None = None  # a parameter that was given another value, which the servers do not know
        # The count is a pushpull, which a compressed store does not have; and it would be compressed.
        self.staleness = Staleness(self._store) if asynchronous and not self._store.compressed else None

    def use(self, optimizer: mx.optimizer.Optimizer, description: dict[str, Any]) -> None:
        self._optimizer, self._description = optimizer, description
        self._told = optimizer.lr
        self._settings = settings(optimizer)
        self._guard = guard(optimizer)

    def release(self) -> None:
        super().release()
        self._guard.released = True

    def before_start(self) -> None:
        self._factors_told = self._factors()
        if self.trainable and self._store.rank == 0:
            said = {**self._description, **self._factors_told}
            self._store.command("optimize", self.keys, optimizer=said)
        if self.staleness is not None:
            self.staleness.start()

    def _factors(self) -> dict[str, dict[int, float]]:
        """The multipliers by key: the servers know no Parameters."""
        keyed = dict(zip(self.keys, self.trainable, strict=True))
        return {
            name: {key: getattr(parameter, name) for key, parameter in keyed.items()} for name in ("lr_mult", "wd_mult")
        }

    def sending(self, keys: list[int], gradients: list[list[nd.NDArray]]) -> Callable[[], None]:
        return self._store.pushing(keys, gradients, [list(copies) for copies in zip(*self.weights, strict=True)])

    def backward(self, losses: Sequence[nd.NDArray], shares: Sequence[float], micro: MicroBatch) -> None:
        self._weighs = self._weighs or micro.weight > 0
        super().backward(losses, shares, micro)

    def exchange_gradients(self) -> None:
        """Not yet: to send a gradient is to apply it."""

    def average(self, what: str, size: int) -> None:
        """`flush` asks for the mean gradient; here `apply` sends it, and the servers sum."""
        if what != "gradients":
            super().average(what, size)

    def apply(self, update: Update) -> float | nd.NDArray:
        self._check_settings()
        self.complete()
        rescale, mean_weight = self.rescale(update)
        self._updates += 1
        self._tell_rate(update.lr)
        if self._asynchronous and not self._weighs:  # nothing to add; an empty gradient would still decay and drift
            self.pull()
        else:
            for gradients in self._by_key if rescale != 1.0 else ():
                for gradient in gradients:
                    gradient *= rescale
            self.send()
            self._pushed += 1
            if self._told and self._told != self._told_inside:
                self._told_inside, self._inside = self._told, dict.fromkeys(self.saved_names, self._told)
            if self.staleness is not None:
                self.staleness.count()
        self._weighs = False
        return mean_weight

    def open(self) -> None:
        super().open()
        if self._set is not None:
            raise StateError(
                f"parameter {self._set} was given another value after prepare(), as by set_data(), and the servers, "
                "which hold the parameters, would take it back: use update_on='worker' with dist_sync, or strategy.load"
            )

    def value_set(self, parameter: Any) -> None:
        place = self._places.get(id(parameter))
        if self.started and place is not None:
            self._set = self.names[place]

    def settle(self) -> None:
        before = self.weights[0] if self.started else []
        super().settle()
        if not self.started:
            return
        _check_unchanged(self._factors(), self._factors_told)
        for name, then, now in zip(self.names, before, self.weights[0], strict=True):
            if then is not now and not np.array_equal(then.asnumpy(), now.asnumpy(), equal_nan=True):
                self._set = name

    def _check_settings(self) -> None:
        _check_unchanged(settings(self._optimizer), self._settings)

    def _tell_rate(self, rate: float | None) -> None:
        """The servers never look at the worker's optimizer again, so its rate has to be sent whenever it changes."""
        optimizer = self._optimizer
        if rate is not None:
            set_rate(optimizer, rate)
        count = optimizer.begin_num_update + self._updates
        rate = optimizer.lr_scheduler(count) if optimizer.lr_scheduler else optimizer.lr
        if rate == self._told:
            return
        self._told = rate
        if self._asynchronous or self._store.rank == 0:
            # A command overtakes gradients that are on their way. With the last parameters back, none of ours is; and
            # in dist_sync no update can begin before this worker's next gradient.
            for weight in self.weights[0]:
                weight.wait_to_read()
            self._store.command("rate", self.keys, rate=rate, update=self._updates)

    def pull(self) -> None:
        """Take over what the servers hold now."""
        # After a pushpull from one device the library receives into what was sent: the gradients, which may be waiting.
        kept = [[gradient.copy() for gradient in gradients] for gradients in self._by_key]
        self._store.kv.pull(self.keys, out=[list(on_devices) for on_devices in zip(*self.weights, strict=True)])
        for copies, gradients in zip(kept, self._by_key, strict=True):
            for copy, gradient in zip(copies, gradients, strict=True):
                copy.copyto(gradient)

    def catch_up(self) -> None:
        if self._asynchronous:
            self.pull()

    def even_out(self) -> None:
        if self._asynchronous:
            nd.waitall()  # what we sent has been applied when its answer is here
            self._exchange.meet()
            self.pull()
            nd.waitall()
            self._exchange.meet()

    def check_assignable(self) -> None:
        if self._store.compressed:
            raise UnsupportedOperation(
                "the servers hold the parameters, and all that is sent to them is compressed to 2 bits: load values "
                "into the model before prepare(), or use update_on='worker'"
            )

    def values_changed(self, rank_0: bool) -> None:
        """Make the servers hold what this model holds on rank 0."""
        if self.disturbed:
            self.settle()
        self._set = None
        self._visit("assign", self.keys, self.weights[0], rank_0)
        self.pull()
        self._train(rank_0)
        if not rank_0 and self._asynchronous:
            self.pull()

    # -- the servers' optimizer, in a checkpoint -----------------------------------------------------------------

    def optimizer_state(self, writes: bool) -> tuple[dict[str, nd.NDArray], dict[str, Any]]:
        """The servers put it in the place of the parameters, one part after the other, and rank 0 pulls it."""
        slots, counts = self._slots(), self._counts()
        shown = [n for n, name in enumerate(self.saved_names) if counts[name] or name in self._filled]
        keys, weights = [self.keys[n] for n in shown], [self.weights[0][n] for n in shown]
        rates = {name: self._inside.get(name, 1.0) for name in self.saved_names} if is_sgd(self._optimizer) else {}
        if writes and rates and keys:
            self._store.command("settle", keys, rates={self.keys[n]: rates[self.saved_names[n]] for n in shown})
        states: dict[str, list[nd.NDArray]] = {name: [] for name in self.saved_names}
        for slot in range(slots):
            self._visit("show", keys, weights, writes, slot=slot)
            for n in shown if writes else ():
                states[self.saved_names[n]].append(nd.zeros_like(self.weights[0][n]))
                self._store.kv.pull(self.keys[n], out=states[self.saved_names[n]][-1])
        if slots:
            self._visit("hide", keys, weights, writes)
        self._train(writes)
        return described(self._optimizer, states, counts, rates, self._updates) if writes else ({}, {})

    def load_optimizer_state(
        self, arrays: Mapping[str, np.ndarray], values: Mapping[str, Any], rank_0: bool
    ) -> Callable[[], None]:
        named = dict(zip(self.saved_names, self.weights[0], strict=True))
        self._slots()
        return partial(self._restore, checked(self._optimizer, named, arrays, values), rank_0)

    def _restore(self, saved: Saved, rank_0: bool) -> None:
        nd.waitall()
        self._exchange.meet()
        keyed = {name: key for name, key in zip(self.saved_names, self.keys, strict=True) if name in saved.states}
        if rank_0:
            counts, rates = ({keyed[name]: by_name[name] for name in keyed} for by_name in (saved.counts, saved.rates))
            self._store.command("restore", self.keys, counts=counts, rates=rates)
        dtypes = {name: weight.dtype for name, weight in zip(self.saved_names, self.weights[0], strict=True)}
        for slot in range(self._slots()):
            sent = [nd.array(saved.states[name][slot], dtype=dtypes[name]) for name in keyed]
            self._visit("fill", list(keyed.values()), sent, rank_0, slot=slot)
        self._train(rank_0)
        self._counted, self._pushed, self._updates = dict(saved.counts), 0, saved.updates
        self._filled = set(saved.states)
        self._inside, self._told_inside = dict(saved.rates), None
        if saved.rate is not None:
            set_rate(self._optimizer, saved.rate)

    def _slots(self) -> int:
        """How many arrays the servers keep for a parameter. Each travels as if it were the parameter."""
        if self._slots_per_parameter is None:
            first = [(tuple(weight.shape), weight.dtype) for weight in self.weights[0]]
            kept = [state_arrays(self._optimizer, weight) for weight in self.weights[0]]
            if any(state != like for states, like in zip(kept, first, strict=True) for state in states):
                raise UnsupportedOperation(
                    f"{type(self._optimizer).__name__} keeps arrays that are not like their parameters, and the "
                    "servers hold them: save the model alone, or use update_on='worker' with dist_sync"
                )
            self._slots_per_parameter = len(kept[0])
        return self._slots_per_parameter

    def _counts(self) -> dict[str, int]:
        """How often the servers have updated each parameter. Nobody sends anything any more after this."""
        nd.waitall()
        pushed = self._pushed
        if self._asynchronous:
            pushed = int(self._exchange.reduce(np.array([pushed]), "sum")[0])
        else:
            self._exchange.meet()
        return {name: self._counted.get(name, 0) + pushed for name in self.saved_names}

    def _visit(self, do: str, keys: list[int], arrays: Sequence[nd.NDArray], rank_0: bool, **said: Any) -> None:
        """Rank 0 sends an array to each key, and the servers do this with it instead of an update. All workers come."""
        nd.waitall()
        self._exchange.meet()
        if rank_0:
            self._store.command(do, keys, **said)
        self._exchange.meet()
        if rank_0 or not self._asynchronous:  # in dist_sync the servers wait for something from everybody
            for key, array in zip(keys, arrays, strict=True):
                # A copy: the next pull of this key is received into what was sent.
                self._store.kv.push(key, in_default_layout(array).copy() if rank_0 else nd.zeros_like(array))
        nd.waitall()

    def _train(self, rank_0: bool) -> None:
        nd.waitall()
        self._exchange.meet()
        if rank_0:
            self._store.command("train", self.keys)
        self._exchange.meet()


def _check_unchanged(now: Mapping[str, object], then: Mapping[str, object]) -> None:
    """The servers were told once, and a change here would not reach them."""
    for name, value in now.items():
        if value != then.get(name):
            raise StateError(
                f"{name} was changed after prepare(), and the servers hold the optimizer: set it before, or use "
                "update_on='worker' with dist_sync. The learning rate may change at any time"
            )


class Staleness:
    """How many updates others made between two of ours: all workers count on one key of a server."""

    BEHIND = 8  # counts are read so many updates later, when they have long arrived and cost no waiting

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: deque[nd.NDArray] = deque()
        self._last: int | None = None
        self.updates, self.total, self.worst = 0, 0, 0

    def start(self) -> None:
        self._key, self._latest = self._store.keys(["updates"])[0], nd.zeros(1)
        if self._store.rank == 0:
            self._store.command("count", [self._key])
        self._store.kv.init(self._key, nd.zeros(1))

    def count(self) -> None:
        # Made from the last answer, so that the engine sends one after the other. The next takes the place of the 1.
        counter = self._latest = nd.ones_like(self._latest)
        self._store.kv.pushpull(self._key, counter)
        self._waiting.append(counter)
        if len(self._waiting) > self.BEHIND:
            self._read()

    def _read(self) -> None:
        now = int(self._waiting.popleft().asscalar())
        if self._last is not None:
            between = now - self._last - 1
            self.updates, self.total, self.worst = self.updates + 1, self.total + between, max(self.worst, between)
        self._last = now

    def settle(self) -> None:
        while self._waiting:
            self._read()

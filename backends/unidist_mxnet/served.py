"""A prepared model whose parameters and optimizer live on the servers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import mxnet as mx
from mxnet import nd

from unidist.backend import Update
from unidist.errors import StateError, UnsupportedOperation
from unidist_mxnet.optimizers import set_rate, settings
from unidist_mxnet.store import Store
from unidist_mxnet.trained import Trained


class UpdatedByServer(Trained):
    """The servers hold the parameters and the optimizer. Workers send gradients and get parameters back."""

    optimized = True

    def __init__(self, *arguments: Any, asynchronous: bool) -> None:
        super().__init__(*arguments)
        self._asynchronous = asynchronous
        self._updates = 0
        self._weighs = False  # whether any sample is in the gradient
        # The count is a pushpull, which a compressed store does not have; and it would be compressed.
        self.staleness = Staleness(self._store) if asynchronous and not self._store.compressed else None

    def use(self, optimizer: mx.optimizer.Optimizer, description: dict[str, Any]) -> None:
        self._optimizer, self._description = optimizer, description
        self._told = optimizer.lr
        self._settings = settings(optimizer)

    def before_start(self) -> None:
        self._factors_told = self._factors()
        if self.trainable and self._store.rank == 0:
            said = {**self._description, **self._factors_told}
            self._store.command("optimize", self.keys, optimizer=said)
        if self.staleness is not None:
            self.staleness.start()

    def _factors(self) -> dict[str, dict[int, float]]:
        """By key: the servers know no Parameters."""
        keyed = dict(zip(self.keys, self.trainable, strict=True))
        return {name: {key: getattr(each, name) for key, each in keyed.items()} for name in ("lr_mult", "wd_mult")}

    def backward(self, losses: Sequence[nd.NDArray], weights: Sequence[float]) -> None:
        self._weighs = self._weighs or any(weights)
        super().backward(losses, weights)

    def exchange_gradients(self) -> None:
        """Not yet: to send a gradient is to apply it."""

    def average(self, what: str, size: int) -> None:
        """`flush` asks for the mean gradient; here `apply` sends it, and the servers sum."""
        if what != "gradients":
            super().average(what, size)

    def apply(self, update: Update) -> None:
        self._check_settled()
        self._updates += 1
        self._tell_rate(update.lr)
        weights = [list(each) for each in zip(*self.weights, strict=True)]
        if self._asynchronous and not self._weighs:  # nothing to add; an empty gradient would still decay and drift
            self.pull()
        else:
            for n, (key, gradients) in enumerate(zip(self.keys, self._by_key, strict=True)):
                if update.rescale != 1.0:
                    for gradient in gradients:
                        gradient *= update.rescale
                self._store.pushpull(key, gradients, weights[n], -n)
            if self.staleness is not None:
                self.staleness.count()
        self._weighs = False
        if self.adding:
            self.clear()

    def _check_settled(self) -> None:
        """The servers were told once, and a change here would not reach them."""
        for now, then in (
            (settings(self._optimizer), self._settings),
            (self._factors(), self._factors_told),
        ):
            for name, value in now.items():
                if value != then.get(name):
                    raise StateError(
                        f"{name} was changed after prepare(), and the servers hold the optimizer: set it before, or "
                        "use update_on='worker' with dist_sync. The learning rate may change at any time"
                    )

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
            for each in self.weights[0]:
                each.wait_to_read()
            self._store.command("rate", self.keys, rate=rate, update=self._updates)

    def pull(self) -> None:
        """What the servers hold now."""
        # After a pushpull from one device the library receives into what was sent: the gradients, which may be waiting.
        kept = [[each.copy() for each in gradients] for gradients in self._by_key] if self.adding else []
        for n, key in enumerate(self.keys):
            self._store.kv.pull(key, out=[weights[n] for weights in self.weights])
        for copies, gradients in zip(kept, self._by_key, strict=False):
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

    def values_changed(self, rank_0: bool) -> None:
        """Make the servers hold what this model holds on rank 0."""
        if self._store.compressed:
            raise UnsupportedOperation(
                "the servers hold the parameters, and all that is sent to them is compressed to 2 bits: load values "
                "into the model before prepare(), or use update_on='worker'"
            )
        nd.waitall()
        self._exchange.meet()
        if rank_0:
            self._store.command("assign", self.keys)
        self._exchange.meet()
        if rank_0 or not self._asynchronous:
            for key, weight in zip(self.keys, self.weights[0], strict=True):
                self._store.kv.push(key, weight if rank_0 else nd.zeros_like(weight))
        self.pull()
        nd.waitall()
        self._exchange.meet()
        if rank_0:
            self._store.command("train", self.keys)
        self._exchange.meet()
        if not rank_0 and self._asynchronous:
            self.pull()


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

"""A prepared model whose parameters and optimizer live on the workers."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import nd

from unidist.plugin import Update
from unidist_mxnet.fused import divide
from unidist_mxnet.optimized_model import Optimized
from unidist_mxnet.optimizer_state import checked, follow, restore_state, saved_state
from unidist_mxnet.optimizers import FusedSGD, set_rate
from unidist_mxnet.watched import guard


class UpdatedByWorker(Optimized):
    """Every worker makes the same update to its own copy."""

    def use(self, optimizers: list[mx.optimizer.Optimizer]) -> None:
        """One for each device, or one for all."""
        self._optimizers = optimizers
        self._scale = optimizers[0].rescale_grad
        self._indices = list(range(len(self.trainable)))
        for optimizer in optimizers:
            optimizer.param_dict = dict(enumerate(self.trainable))  # for their lr_mult and wd_mult
        contexts = self.trainable[0].list_ctx()
        shared = optimizers if len(optimizers) == len(contexts) else optimizers * len(contexts)
        self.updaters = [mx.optimizer.get_updater(optimizer) for optimizer in shared]
        self._guards = [guard(optimizer) for optimizer in optimizers]
        self._schedules = [
            copy.deepcopy(optimizer.lr_scheduler) for optimizer in optimizers
        ]  # as they were at the beginning

    def apply(self, update: Update) -> float | nd.NDArray:
        self.complete()
        if not self.sync and len(self.gradients) > 1:
            self._sum_over_devices()
        rescale, mean_weight = self.rescale(update)
        scale = self._scale * rescale
        if update.clip_norm is not None:
            squares = nd.multi_sum_sq(*self.gradients[0], num_arrays=len(self.gradients[0]))
            norm = abs(scale) * float(squares.sum().asscalar()) ** 0.5
            scale *= min(1.0, update.clip_norm / (norm + 1e-6))
        first = self._optimizers[0]
        if update.lr is not None:
            set_rate(first, update.lr)
        self._divide_by(mean_weight)
        for optimizer in self._optimizers:
            optimizer.rescale_grad = scale
            if optimizer is not first:
                set_rate(optimizer, first.lr)
        with contextlib.ExitStack() as stepping:
            for watched in self._guards:
                stepping.enter_context(watched)
            for updater, weights, gradients in zip(self.updaters, self.weights, self.gradients, strict=True):
                updater(self._indices, gradients, weights)
        return mean_weight

    def _divide_by(self, mean_weight: float | nd.NDArray) -> None:
        """The gradients, or have them divided on the way."""
        means = [None] * len(self.gradients) if isinstance(mean_weight, float) else self._mean_weights
        for updater, gradients, mean in zip(self.updaters, self.gradients, means, strict=True):
            if isinstance(updater.optimizer, FusedSGD):
                updater.optimizer.mean_weight = mean
            elif mean is not None:
                divide(gradients, mean)

    def average(self, what: str, size: int) -> None:
        super().average(what, size)
        if what == "parameters":
            self.values_changed(rank_0=False)

    def release(self) -> None:
        super().release()
        for watched in self._guards:
            watched.released = True

    def values_changed(self, rank_0: bool) -> None:
        for updater, weights in zip(self.updaters, self.weights if self.started else (), strict=self.started):
            for n, weight in enumerate(weights):
                follow(updater, n, weight)

    def optimizer_state(self, writes: bool) -> tuple[dict[str, nd.NDArray], dict[str, Any]]:
        return saved_state(self.updaters[0], self.saved_names) if writes else ({}, {})

    def load_optimizer_state(
        self, arrays: Mapping[str, np.ndarray], values: Mapping[str, Any], rank_0: bool
    ) -> Callable[[], None]:
        named = dict(zip(self.saved_names, self.weights[0], strict=True))
        saved = checked(self._optimizers[0], named, arrays, values)

        def put() -> None:
            for optimizer, schedule in zip(self._optimizers, self._schedules, strict=True):
                optimizer.lr_scheduler = copy.deepcopy(schedule)  # MXNet's count as they go, and never back
            for updater, weights in zip(self.updaters, self.weights, strict=True):
                restore_state(updater, self.saved_names, weights, saved)

        return put

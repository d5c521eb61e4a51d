"""unidist's optimizers on MXNet's fused kernels, with the arithmetic that all backends share.

MXNet's own differ in two ways that show: the rate is kept inside the momentum, so a schedule bends the path, and Adam
adds its epsilon before the bias correction. Both can be undone by the scalars that the kernels are given.
"""

from __future__ import annotations

import math
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import nd

from unidist.plugin import SGD, Adam, AdamW, OptimizerSpec, UnsupportedOperation, UsageError
from unidist_mxnet.arrays import from_numpy
from unidist_mxnet.fused import divide

AT_ONCE = 40  # parameters that one kernel updates; MXNet's limit is 60


def from_spec(spec: OptimizerSpec) -> mx.optimizer.Optimizer:
    return from_description(describe(spec))


def describe(optimizer: OptimizerSpec | mx.optimizer.Optimizer) -> dict[str, Any]:
    """As plain data, for a server."""
    if isinstance(optimizer, mx.optimizer.Optimizer):
        return _describe_native(optimizer)
    common = {"learning_rate": optimizer.rate(0), "wd": optimizer.weight_decay}
    match optimizer:
        case SGD():
            return {"kind": "sgd", "momentum": optimizer.momentum, "nesterov": optimizer.nesterov, **common}
        case Adam():
            decoupled = isinstance(optimizer, AdamW)
            return {"kind": "adam", "betas": optimizer.betas, "eps": optimizer.eps, "decoupled": decoupled, **common}
    raise UsageError(
        f"the mxnet backend does not know the optimizer spec {type(optimizer).__name__}: pass an mx.optimizer one"
    )


def from_description(said: dict[str, Any]) -> mx.optimizer.Optimizer:
    said = dict(said)
    kind = said.pop("kind")
    factors = {name: said.pop(name, {}) for name in ("lr_mult", "wd_mult")}
    if kind == "native":
        optimizer = mx.optimizer.Optimizer.create_optimizer(said["name"])
        for name, value in said["attributes"].items():
            setattr(optimizer, name, value)
    else:
        optimizer = {"sgd": FusedSGD, "adam": FusedAdam}[kind](**said)
    for name, by_key in factors.items():
        setattr(optimizer, name, {int(key): factor for key, factor in by_key.items()})
    return optimizer


def set_rate(optimizer: mx.optimizer.Optimizer, rate: float) -> None:
    optimizer.lr = rate  # not set_learning_rate: it refuses where a scheduler is set, whose rate this may be


def settings(optimizer: mx.optimizer.Optimizer) -> dict[str, object]:
    """Those that stay as they are during a training; the others count what was done, or belong to a step."""
    plain, moving = (bool, int, float, str, type(None)), ("lr", "num_update", "m_schedule", "mean_weight")
    return {k: v for k, v in vars(optimizer).items() if isinstance(v, plain) and k[0] != "_" and k not in moving}


# What an optimizer keeps for itself and a server makes anew.
_KEPT = ("lr_scheduler", "param_dict", "idx2name", "sym_info", "lr_mult", "wd_mult", "update", "update_multi_precision")


def _describe_native(optimizer: mx.optimizer.Optimizer) -> dict[str, Any]:
    """The settings of an MXNet optimizer. MXNet would pickle it, and a server would run whatever is in there."""
    name = type(optimizer).__name__.lower()
    if mx.optimizer.Optimizer.opt_registry.get(name) is not type(optimizer):
        raise UnsupportedOperation(
            f"{type(optimizer).__name__} is not registered with MXNet, so the servers cannot build it: use "
            "update_on='worker' with dist_sync, or unidist.SGD/Adam/AdamW"
        )
    attributes = {k: v for k, v in vars(optimizer).items() if k not in _KEPT and not k.startswith("_")}
    for key, value in attributes.items():
        if not isinstance(value, (bool, int, float, str, type(None))):
            raise UnsupportedOperation(
                f"{type(optimizer).__name__}.{key} is of type {type(value).__name__}, which cannot be told to the "
                "servers: use update_on='worker' with dist_sync"
            )
    return {"kind": "native", "name": name, "attributes": attributes}


class FusedSGD(mx.optimizer.Optimizer):  # type: ignore[misc]  # MXNet is not there to be checked
    """velocity = momentum * velocity + gradient; weight -= rate * velocity.

    The kernels keep -rate * velocity. When the rate changes they are given a momentum that brings it along.
    """

    def __init__(self, momentum: float = 0.0, nesterov: bool = False, **common: Any) -> None:
        super().__init__(**common)
        self.momentum, self.nesterov = momentum, nesterov
        self.aggregate_num = 0 if nesterov else AT_ONCE
        self.rates: dict[Any, float] = {}  # the rate that is inside the momentum of each parameter; never 0
        self.mean_weight: nd.NDArray | None = None  # what the gradients are still to be divided by
        self._on_device: dict[tuple[float, ...], nd.NDArray] = {}

    def create_state(self, index: Any, weight: nd.NDArray) -> nd.NDArray | None:
        return nd.zeros(weight.shape, weight.context, dtype=weight.dtype) if self.momentum else None

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        if not isinstance(index, (list, tuple)):
            index, weight, grad, state = [index], [weight], [grad], [state]
        self._update_count(index)
        rates, decays = self._get_lrs(index), self._get_wds(index)
        common: dict[str, Any] = {"rescale_grad": self.rescale_grad}
        if self.clip_gradient:
            common["clip_gradient"] = self.clip_gradient
        rate = self.learning_rate
        inside = {self.rates.get(place, rate or 1.0) for place in index} if self.momentum else {1.0}
        together = not self.momentum or (rate and len(inside) == 1 and not self.nesterov)
        if self.mean_weight is not None and (not together or self.clip_gradient):
            divide(grad, self.mean_weight)
        if not together:
            for at, w, g, s, decay in zip(index, weight, grad, state, decays, strict=True):
                self._update_one(at, w, g, s, rate, decay, common)
        else:
            if self.momentum:
                common["momentum"] = self.momentum * (rate / inside.pop())
            columns = (weight, grad, state) if self.momentum else (weight, grad)
            flat = [array for row in zip(*columns, strict=True) for array in row]
            self._update_together(flat, list(weight), rates, decays, common)
        if rate and self.momentum:
            self.rates.update(dict.fromkeys(index, rate))

    def _update_together(self, flat: Any, weight: Any, rates: Any, decays: Any, common: Any) -> None:
        common |= {"out": weight, "num_weights": len(weight)}
        if self.mean_weight is None or self.clip_gradient:
            kernel = nd.multi_sgd_mom_update if self.momentum else nd.multi_sgd_update
            kernel(*flat, lrs=rates, wds=decays, **common)
        else:  # a rate that is divided moves by a gradient that is divided, and the decay is not to be
            kernel = nd.preloaded_multi_sgd_mom_update if self.momentum else nd.preloaded_multi_sgd_update
            lrs = nd.broadcast_div(self._array(rates), self.mean_weight)
            wds = nd.broadcast_mul(self._array(decays), self.mean_weight) if any(decays) else self._array(decays)
            kernel(*flat, lrs, wds, **common)

    def _array(self, numbers: list[float]) -> nd.NDArray:
        assert self.mean_weight is not None
        key = tuple(numbers)
        if key not in self._on_device:
            if len(self._on_device) > 100:  # a schedule makes others in each step
                self._on_device.clear()
            self._on_device[key] = from_numpy(np.array(numbers, np.float32), self.mean_weight.context).as_nd_ndarray()
        return self._on_device[key]

    def _update_one(
        self, index: Any, weight: Any, grad: Any, state: Any, rate: float, decay: float, common: Any
    ) -> None:
        inside = self.rates.setdefault(index, rate or 1.0)
        if rate and rate != inside:
            state *= rate / inside
        # At rate 0 the weight stands still and the velocity does not: let the kernel move something else. Nesterov's
        # reads the weight again after it wrote the new one, so it may not write in place either.
        moved = weight if rate and not self.nesterov else nd.empty(weight.shape, weight.context, dtype=weight.dtype)
        kernel = nd.nag_mom_update if self.nesterov else nd.sgd_mom_update
        factor = self.param_dict[index].lr_mult if index in self.param_dict else self.lr_mult.get(index, 1.0)
        lr = (rate or inside) * factor
        kernel(weight, grad, state, out=moved, lr=lr, momentum=self.momentum, wd=decay, **common)
        if rate and moved is not weight:
            moved.copyto(weight)

    update_multi_precision = update


class FusedAdam(mx.optimizer.Optimizer):  # type: ignore[misc]  # MXNet is not there to be checked
    """Adam with epsilon after the bias correction; `decoupled` makes it AdamW."""

    def __init__(self, betas: tuple[float, float], eps: float, decoupled: bool, **common: Any) -> None:
        super().__init__(**common)
        # The kernel works with these in float32, where 1 - 0.999 is off by 1e-5: the correction must use the same.
        self.beta1, self.beta2 = (float(np.float32(beta)) for beta in betas)
        self.eps, self.decoupled = eps, decoupled

    def create_state(self, index: Any, weight: nd.NDArray) -> tuple[nd.NDArray, ...]:
        return tuple(nd.zeros(weight.shape, weight.context, dtype=weight.dtype) for _ in range(2))

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        self._update_count(index)
        rate, decay, t = self._get_lr(index), self._get_wd(index), self._index_update_count[index]
        second = math.sqrt(1 - self.beta2**t)
        common: dict[str, Any] = {"rescale_grad": self.rescale_grad}
        if self.clip_gradient:
            common["clip_gradient"] = self.clip_gradient
        if self.decoupled and decay:
            weight *= 1 - rate * decay
        nd.adam_update(
            weight,
            grad,
            *state,
            out=weight,
            lr=rate * second / (1 - self.beta1**t),
            beta1=self.beta1,
            beta2=self.beta2,
            epsilon=self.eps * second,
            wd=0.0 if self.decoupled else decay,
            **common,
        )

"""Arithmetic on all gradients at once: MXNet has such kernels for optimizers, and these can be told to do less."""

from __future__ import annotations

from collections.abc import Sequence

import mxnet as mx
from mxnet import nd

AT_ONCE = 60  # arrays that one kernel takes


class Zeros:
    """Views of one array of zeros on each device, which nobody writes to."""

    def __init__(self) -> None:
        self._whole: dict[mx.Context, nd.NDArray] = {}
        self._views: dict[tuple[mx.Context, tuple[int, ...]], nd.NDArray] = {}

    def like(self, array: nd.NDArray) -> nd.NDArray:
        context, shape = array.context, array.shape
        view = self._views.get((context, shape))
        if view is None:
            if context not in self._whole or self._whole[context].size < array.size:
                self._whole[context] = nd.zeros(array.size, context)
                self._views = {key: kept for key, kept in self._views.items() if key[0] != context}
            view = self._views[context, shape] = self._whole[context][: array.size].reshape(shape)
        return view


_zeros = Zeros()


def divide(arrays: Sequence[nd.NDArray], number: nd.NDArray) -> None:
    """Divide in place, in float32, without reading the number."""
    rate = -1 / number  # 0 minus such a part of an array is what is wanted
    arrays = [array for array in arrays if array.size]
    for first in range(0, len(arrays), AT_ONCE):
        some = arrays[first : first + AT_ONCE]
        count = len(some)
        both = [operand for array in some for operand in (_zeros.like(array), array)]
        rates, decays = nd.broadcast_to(rate, (count,)), nd.zeros(count, number.context)
        nd.preloaded_multi_sgd_update(*both, rates, decays, out=some, num_weights=count)


class Sums:
    """Sums of gradients, apart from Gluon's arrays: what else computes gradients does not reach them."""

    def __init__(self, gradients: Sequence[Sequence[nd.NDArray]]) -> None:
        self._arrays = [[nd.zeros_like(array) for array in device] for device in gradients]
        alike: dict[object, list[int]] = {}  # what one kernel takes has one dtype
        for n, gradient in enumerate(gradients[0] if gradients else ()):
            if gradient.size:
                alike.setdefault(gradient.dtype, []).append(n)
        self._together = [places[a : a + AT_ONCE] for places in alike.values() for a in range(0, len(places), AT_ONCE)]
        self.empty = True

    def add(self, gradients: Sequence[Sequence[nd.NDArray]]) -> None:
        if self.empty:
            clear(self._arrays)
        self.empty = False
        for sums, device in zip(self._arrays, gradients, strict=True):
            self._add(sums, device)

    def move_to(self, gradients: Sequence[Sequence[nd.NDArray]]) -> None:
        """Add the sums to these gradients."""
        if not self.empty:
            for sums, device in zip(self._arrays, gradients, strict=True):
                self._add(device, sums)
        self.empty = True

    def _add(self, to: Sequence[nd.NDArray], more: Sequence[nd.NDArray]) -> None:
        for some in self._together:
            count = len(some)
            both = [operand for n in some for operand in (to[n], more[n])]
            result = [to[n] for n in some]
            nd.multi_sgd_update(*both, lrs=(-1.0,) * count, wds=(0.0,) * count, out=result, num_weights=count)


def clear(arrays: Sequence[Sequence[nd.NDArray]]) -> None:
    for device in arrays:
        nd.reset_arrays(*device, num_arrays=len(device))

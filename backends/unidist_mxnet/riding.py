"""The weight of a step travels at the end of a gradient: as a message of its own it would take as long as those of a
small model together, and everything would wait for it."""

from __future__ import annotations

from collections.abc import Sequence

import mxnet as mx
import numpy as np
from mxnet import nd

NOTHING = 1e-30  # the weight of no sample: the gradients are 0 then, and may be divided by it


def rider(parameters: Sequence[mx.gluon.Parameter]) -> int | None:
    """Whose gradient takes the weight along: the smallest. None where the weight would be rounded, or where the
    gradients cannot be divided by it on their device, which is done in float32."""
    if any(np.dtype(parameter.dtype) != np.float32 for parameter in parameters):
        return None
    sizes = {n: parameter.list_data()[0].size for n, parameter in enumerate(parameters)}
    return min((n for n, size in sizes.items() if size), key=sizes.__getitem__, default=None)


class Carriers:
    """For each device an array that a gradient is copied to and back from, with room for a number behind it. The
    gradients stay where they are: a graph that was hybridized with static_alloc goes on writing to the arrays of its
    first backward."""

    def __init__(self, parameter: mx.gluon.Parameter) -> None:
        values = parameter.list_data()
        self.arrays = [nd.zeros(array.size + 1, array.context) for array in values]
        self.numbers = [array[-1:] for array in self.arrays]
        self._places = [
            array[:-1].reshape(value.shape) for array, value in zip(self.arrays, values, strict=True)
        ]  # these share its memory

    def load(self, gradients: Sequence[nd.NDArray]) -> None:
        for gradient, place in zip(gradients, self._places, strict=True):
            gradient.copyto(place)

    def unload(self, gradients: Sequence[nd.NDArray]) -> None:
        for gradient, place in zip(gradients, self._places, strict=True):
            place.copyto(gradient)

"""What carries gradients and everything else between ranks, as models see it: a KVStore and the control plane, or
whatever else can do the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from mxnet import nd

from unidist.plugin import Reduction


class GradientStore(Protocol):
    """A sum over ranks by key. All of it may return before it is done, as all of MXNet."""

    kv: Any  # None: nothing has to be exchanged
    workers: int
    rounds_dtypes: bool  # only float32 and float16 get through unharmed
    compressed: bool  # nothing but gradients bears what happens to it on the way
    rank_0_leads: bool  # whether `start` spreads the values of rank 0; a KVStore may number the workers in its own way

    def keys(self, names: Sequence[str]) -> list[int]:
        """New ones, one for each name, which need not be new; every rank asks in the same order."""

    def start(self, keys: list[int], arrays: Sequence[nd.NDArray], out: Sequence[Any]) -> None:
        """Give the keys the first rank's arrays, and everybody these values."""

    def summing(self, keys: list[int], arrays: Sequence[list[nd.NDArray]]) -> Callable[[], None]:
        """What sums each array over ranks and devices whenever it is called, in place on every device. The first are
        needed first. It is made once, so that a step need not look at each of them."""

    def start_sum(self, key: int, array: nd.NDArray) -> None:
        """Before the first sum by a key that `start` was not given."""

    def sum(self, key: int, array: nd.NDArray, priority: int, exchange: ValueExchange) -> None:
        """Over ranks, in place."""


class ValueExchange(Protocol):
    """Exact collectives on bytes and numpy arrays, done when they return. Every rank calls the same in the same order,
    with data of the same size."""

    def meet(self) -> object:
        """A barrier."""

    def gather(self, data: bytes) -> list[bytes]: ...

    def broadcast(self, data: bytes, source: int) -> bytes: ...

    def reduce(self, array: np.ndarray, op: Reduction) -> np.ndarray: ...

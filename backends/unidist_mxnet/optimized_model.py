"""A prepared model with an optimizer: what is asked of whoever makes the updates, the workers or the servers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from mxnet import nd

from unidist.plugin import Update
from unidist_mxnet.prepared_model import Trained


class Optimized(Trained, ABC):
    @abstractmethod
    def apply(self, update: Update) -> float | nd.NDArray:
        """Make the update; the mean weight that the gradients were divided by."""

    @abstractmethod
    def optimizer_state(self, writes: bool) -> tuple[dict[str, nd.NDArray], dict[str, Any]]:
        """(tensors, plain values) on the rank that writes; the others may have to take part."""

    @abstractmethod
    def load_optimizer_state(
        self, arrays: Mapping[str, np.ndarray], values: Mapping[str, Any], rank_0: bool
    ) -> Callable[[], None]:
        """Check what `optimizer_state` gave once; what is returned takes it back."""

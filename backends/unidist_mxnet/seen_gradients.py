"""Gradients that the user has seen, and may write to before they are used: changes are found, and refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
from mxnet import nd

from unidist.plugin import StateError

CLEARED = (
    "the gradients were changed in the middle of an accumulation group, as by zero_grad() or clipping: leave it out, "
    "each group begins without any, and clip_norm= of the step clips the gradient of the whole group"
)

Copies = list[tuple[nd.NDArray, nd.NDArray]]  # an array, and what it held


class SeenGradients:
    def __init__(self) -> None:
        self.arrays: list[list[nd.NDArray]] = []  # by parameter, then by device
        self._places: set[int] = set()  # parameters whose gradients somebody else has seen
        self._waiting = False  # gradients wait for the rest of their group
        self._kept: Copies = []  # of those that were seen, while they wait
        self._lost: nd.NDArray | None = None  # how many numbers of them were changed in the meantime
        self._complete = False  # gradients wait for their update, and the user has the say
        self._before_update: dict[int, Copies] = {}

    def add(self, place: int) -> None:
        """Somebody has seen this one."""
        if self._complete and place not in self._before_update:
            self._before_update[place] = self._copied(place)
        if place not in self._places:
            self._places.add(place)
            if self._waiting:
                self._keep({place})

    def wait(self) -> None:
        """They are not complete: nobody may change them until the rest of their group has come."""
        self._waiting = True
        self._keep(self._places)

    def before_update(self) -> None:
        """They are complete, unless they wait: the user may look at them before the update, and change them."""
        if not self._waiting:
            self._complete = True
            self._before_update = {place: self._copied(place) for place in self._places}

    def look_for_changes(self) -> None:
        """To what is waiting; it is not any more. Nothing is read: `take_changes` does."""
        for now, then in self._kept:
            changed = ((now != then) * (now == now)).sum()  # where it is NaN, it is not equal to itself
            self._lost = changed if self._lost is None else self._lost + changed.as_in_context(self._lost.context)
        self._waiting, self._kept = False, []

    def take_changes(self) -> bool:
        """Whether any was changed before the update. What was changed while it waited is lost, and refused."""
        lost, before = self._lost, self._before_update
        self._lost, self._before_update, self._complete = None, {}, False
        if lost is not None and float(lost.asscalar()) > 0:
            raise StateError(CLEARED)
        return _changed(pair for copies in before.values() for pair in copies)

    @contextmanager
    def kept_apart(self) -> Iterator[None]:
        """Inside, gradients of something else are computed, perhaps through this model."""
        waiting = self._waiting
        self.look_for_changes()
        yield
        if waiting:
            self.wait()

    def forget(self) -> None:
        self._waiting, self._kept, self._lost = False, [], None
        self._complete, self._before_update = False, {}

    def _copied(self, place: int) -> Copies:
        return [(array, array.copy()) for array in self.arrays[place]]

    def _keep(self, places: set[int]) -> None:
        self._kept += [pair for place in places for pair in self._copied(place)]


def _changed(pairs: Iterable[tuple[nd.NDArray, nd.NDArray]]) -> bool:
    """Whether any gradient is another than it was."""
    read = [(now.asnumpy(), then.asnumpy()) for now, then in pairs]
    if any(not now.any() and then.any() for now, then in read):  # a clipping leaves something
        raise StateError(
            "the gradients were cleared between backward and step, as by zero_grad(), so there is nothing to apply: "
            "leave it out, each group begins without any"
        )
    return not all(np.array_equal(now, then, equal_nan=True) for now, then in read)

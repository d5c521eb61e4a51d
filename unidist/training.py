"""How each micro-batch weighs and when an optimizer moves: the arithmetic that makes a step the serial step."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from unidist.backend import Update
from unidist.optim import OptimizerSpec

if TYPE_CHECKING:
    from unidist.data.loader import Drawn


class Turn(NamedTuple):
    """One micro-batch: multiply its loss by `weight` before backward; `closes` its group when an update follows."""

    weight: float
    closes: bool
    rescale: float


class Prepared(NamedTuple):
    """What `prepare` gave out. Weak references: a model that the user drops must not live on here."""

    model: weakref.ref[Any]
    optimizer: weakref.ref[Any]
    schedule: Schedule


class Schedule:
    """The state of one prepared optimizer: which micro-batch of its group comes next, and how many updates were made.

    The wanted gradient of a group is sum(n_i * g_i) / sum(n_i) over its micro-batches on all ranks. sum(n_i) is only
    known at the end, so each loss is weighted as if the group were complete, and an incomplete one is corrected once
    at its update. Full groups, the usual case, need no correction and cost nothing.
    """

    def __init__(self, spec: object, accumulate: int, lockstep: bool = True) -> None:
        self._spec = spec if isinstance(spec, OptimizerSpec) and callable(spec.lr) else None
        self._every = accumulate
        self._lockstep = lockstep  # else this rank's updates are its own mean, whatever the others have
        self._micro = 0
        self._samples = 0.0  # of this group so far, in units of a full micro-batch
        self.updates = 0

    def turn(self, drawn: Drawn | None) -> Turn:
        """Open the next micro-batch. `drawn` is what the loader handed out, None when the data is not unidist's.

        Without a loader every batch counts the same and a group is only closed by its number.
        """
        if drawn is None:
            weight, filled, last = 1.0, 1.0, False
        elif self._every == 1:
            weight, filled, last = drawn.weight if self._lockstep else float(drawn.real > 0), 1.0, True
        elif not self._lockstep:
            weight = filled = drawn.real / drawn.epoch.batch.per_worker
            last = drawn.last
        else:
            filled, last = drawn.total / drawn.epoch.batch.global_batch, drawn.last
            weight = drawn.weight * filled
        self._micro += 1
        self._samples += filled
        closes = last or self._micro >= self._every
        rescale = self._every / self._samples if closes and self._samples else 1.0
        if closes:
            self._micro, self._samples = 0, 0.0
        return Turn(weight / self._every, closes, rescale)

    def update(self, turn: Turn, clip_norm: float | None) -> Update:
        rate = self._spec.rate(self.updates) if self._spec else None
        self.updates += 1
        return Update(turn.rescale, clip_norm, rate)

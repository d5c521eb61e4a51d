"""How each micro-batch weighs and when an optimizer moves: the arithmetic that makes a step the serial step."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from unidist.backend import Update
from unidist.optim import OptimizerSpec

if TYPE_CHECKING:
    from unidist.data.loader import Drawn


class Turn(NamedTuple):
    """One micro-batch: multiply its loss by `weight` before backward; it `closes` its group when an update follows."""

    weight: float
    closes: bool
    sync: bool  # gradients are to be averaged over ranks in its backward
    rescale: float
    average: bool  # parameters are to be averaged after its update


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

    With `sync_every` other than 1 (local SGD) every rank goes by its own samples, and parameters are averaged after
    every so many updates and at the end of a pass; with 0, only when the user says so. By its own samples also goes a
    rank that does not make its steps together with the others.
    """

    def __init__(self, spec: object, accumulate: int, sync_every: int = 1, lockstep: bool = True) -> None:
        self._spec = spec if isinstance(spec, OptimizerSpec) and callable(spec.lr) else None
        self._every, self._sync_every = accumulate, sync_every
        self._own_samples = sync_every != 1 or not lockstep
        self._micro = 0
        self._samples = 0.0  # of this group so far, in units of a full micro-batch
        self._apart = False
        self.stale = False  # gradients of a group that was given up are still there
        self.updates = 0

    @property
    def in_group(self) -> bool:
        """Gradients have been accumulated that no update has used yet."""
        return self._micro > 0

    def turn(self, drawn: Drawn | None) -> Turn:
        """Open the next micro-batch. `drawn` is what the loader handed out, None when the data is not unidist's.

        Without a loader every batch counts the same and a group is only closed by its number.
        """
        weight, filled, last = self._share(drawn)
        self._micro += 1
        self._samples += filled
        closes = self._micro >= self._every or last
        rescale = self._every / self._samples if closes and self._samples else 1.0
        if closes:
            self._micro, self._samples = 0, 0.0
        local = self._sync_every != 1
        due = local and self._sync_every > 0 and (last or (self.updates + 1) % self._sync_every == 0)
        return Turn(weight / self._every, closes, closes and not local, rescale, closes and due)

    def close_group(self) -> Turn:
        """An update now, of what has been accumulated so far."""
        rescale = self._every / self._samples if self._samples else 1.0
        self._micro, self._samples = 0, 0.0
        return Turn(0.0, True, self._sync_every == 1, rescale, self._sync_every > 1)

    def give_up(self, updates: int) -> None:
        """An error in the middle of a step: its group is lost, and no update was made."""
        self._micro, self._samples = 0, 0.0
        self.stale, self.updates = True, updates

    @property
    def apart(self) -> bool:
        """Local SGD: the ranks' parameters differ."""
        return self._sync_every > 1 and self._apart

    def brought_together(self) -> None:
        self._apart = False

    def _share(self, drawn: Drawn | None) -> tuple[float, float, bool]:
        """(weight of the local mean loss, how full the micro-batch is, whether it is the last of its pass)."""
        if drawn is None:
            return 1.0, 1.0, False
        if self._own_samples:
            filled = drawn.real / drawn.batch.per_worker if self._every > 1 else float(drawn.real > 0)
            return filled, filled, drawn.last
        if self._every == 1:
            return drawn.weight, 1.0, drawn.last
        filled = drawn.total / drawn.batch.global_batch
        return drawn.weight * filled, filled, drawn.last

    def update(self, turn: Turn, clip_norm: float | None) -> Update:
        rate = self._spec.rate(self.updates) if self._spec else None
        self.updates += 1
        self._apart = not turn.average
        return Update(turn.rescale, clip_norm, rate)

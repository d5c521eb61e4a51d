"""How each micro-batch weighs and when an optimizer moves: the arithmetic that makes a step the serial step."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from unidist.backend import MicroBatch, Update
from unidist.errors import UsageError
from unidist.optim import OptimizerSpec

if TYPE_CHECKING:
    from unidist.data.tracking import BatchInfo, Pass
    from unidist.training.drift import DriftCheck

Reduction = Literal["mean", "sum"]  # what a loss is, of its samples


class Prepared(NamedTuple):
    """What `prepare` gave out. Weak references: a model that the user drops must not live on here."""

    model: weakref.ref[Any]
    optimizer: Callable[[], Any]
    schedule: Schedule
    drift: DriftCheck


class StepPlan(NamedTuple):
    """One micro-batch and what follows it."""

    micro: MicroBatch
    closes: bool  # its group is complete: an update follows
    rescale: float | None  # of that update, see `Update`
    average: bool  # parameters are to be averaged over ranks after the update


class Schedule:
    """The state of one prepared optimizer: which micro-batch of its group comes next, and how many updates were made.

    The wanted gradient of a group is sum(n_i * g_i) / sum(n_i) over its micro-batches on all ranks, n_i samples each.
    Each loss is weighted by its own n_i, and the sum of the weights travels with the gradients. Weights are counted in
    units of the first batch, so that in the usual case they are 1, their mean is 1, and nothing has to be corrected.

    With `sync_every` other than 1 (local SGD) every rank goes by its own samples, and parameters are averaged after
    every so many updates and at the end of a pass; with 0, only when the user says so. By its own samples also goes a
    rank that is alone, or does not make its steps together with the others.
    """

    def __init__(
        self, spec: object, accumulate: int, sync_every: int = 1, *, exchanges: bool, ranks: int, check_every: int = 0
    ) -> None:
        self._spec = spec if isinstance(spec, OptimizerSpec) and callable(spec.lr) else None
        self._every, self._sync_every, self._ranks = accumulate, sync_every, ranks
        self.exchanges = exchanges and sync_every == 1  # gradients and their weights are summed over the ranks
        self._micro = 0
        self._unit = 0.0  # samples in a batch of weight 1
        self._weights = 0.0  # of this group so far
        self._summed = False  # a loss of this group is a sum, not a mean
        self._apart = False
        self.check_every = check_every  # updates between two comparisons of the parameters over ranks
        self.other_axes: list[tuple[int, ...]] = []  # of the arrays of the last micro-batch, all but the first
        self.lengths_mentioned = False  # that these axes change
        self.number = self.foreign_batches = 0  # of this Schedule, and of micro-batches that no loader knows
        self.axes: set[str] = set()  # all but the first axes of batches, as a loader gave them or the ranks compared
        self.foreign_axes: set[str] = set()  # of batches that no loader knows
        self.compared = False  # the first batches of the ranks
        self.stale = False  # gradients of a group that was given up are still there
        self.updates = 0
        self.last_loss: Any = None  # that was given back, by a whole step
        self.last_pass: Pass | None = None  # over a loader, that a batch came from

    @property
    def in_group(self) -> bool:
        """Gradients have been accumulated that no update has used yet."""
        return self._micro > 0

    @property
    def single(self) -> bool:
        """Each group is one micro-batch."""
        return self._every == 1

    @property
    def place(self) -> str:
        return f"{self._micro} of {self._every}"

    def check_reduction(self, reduction: Reduction) -> None:
        """One factor makes the update of a whole group: for a sum it is another one than for a mean."""
        if self.in_group and self._summed != (reduction == "sum"):
            before = "sum" if self._summed else "mean"
            raise UsageError(
                f"reduction={reduction!r} in a group of accumulated batches that was begun with {before!r} (it holds "
                f"{self.place}), and no update is the mean of some losses and the sum of others: let all losses of a "
                "group be of one kind, or end the group first, with flush(model, optimizer)"
            )

    def plan(
        self,
        samples: float,
        info: BatchInfo | None,
        largest: Callable[[float], float],
        reduction: Reduction = "mean",
        told: bool = False,
        last: bool = False,
        in_turn: bool = True,
    ) -> StepPlan:
        """Open the next micro-batch, whose loss is the mean of so many samples.

        `info` is what a loader knows of the batch. With `last` a walk over its pass ends here, on all ranks, and with
        `in_turn` it comes in the order of the pass. `largest(n)` is the largest n on any rank, asked for once.
        """
        if not self._unit and (self.exchanges or self._every > 1) and reduction == "mean":
            usual = float(info.batch.per_worker) if info is not None else samples
            self._unit = (largest(usual) if self.exchanges else usual) or 1.0
        weight = self._weigh(samples, reduction)
        self._micro += 1
        self._weights += weight
        self._summed = reduction == "sum"
        closes = self._micro >= self._every or last
        rescale = self._rescale() if closes else None
        if closes:
            self._end_group()
        due = self._sync_every > 1 and (last or (self.updates + 1) % self._sync_every == 0)
        even = info.even if info is not None and in_turn else None  # else another rank may be at another batch
        if told or self._summed:  # what such a loss is of the batches of all ranks, only the user knows
            even = False
        micro = MicroBatch(weight, closes and self.exchanges, even, self._summed, told=told)
        return StepPlan(micro, closes, rescale, closes and due)

    def _weigh(self, samples: float, reduction: Reduction) -> float:
        if reduction == "sum":
            return float(samples > 0) / self._every
        if not self.exchanges and self._every == 1:  # a mean of its own samples: as the framework itself has it
            return float(samples > 0)
        return samples / self._unit / self._every

    def _rescale(self) -> float | None:
        if self._summed:
            return float(self._every * (self._ranks if self.exchanges else 1))
        if self.exchanges:
            return None
        return 1.0 / self._weights if self._weights and self._every > 1 else 1.0

    def _end_group(self) -> None:
        self._micro, self._weights = 0, 0.0

    def close_group(self, total: Callable[[float], float]) -> StepPlan:
        """An update now, of what has been accumulated so far. `total(w)` is the sum of w over the ranks; when gradients
        are exchanged, they are to be averaged first."""
        rescale = self._rescale()
        if rescale is None:
            rescale = self._ranks / (total(self._weights) or float(self._ranks))
        self._end_group()
        return StepPlan(MicroBatch(0.0, self.exchanges), True, rescale, self._sync_every > 1)

    def give_up(self, updates: int) -> None:
        """An error in the middle of a step: its group is lost, and no update was made."""
        self._end_group()
        self.stale, self.updates = True, updates

    @property
    def comparable(self) -> bool:
        """Whether the ranks must hold the same parameters now."""
        return self.exchanges or (self._sync_every > 1 and not self._apart)

    @property
    def apart(self) -> bool:
        """Local SGD: the ranks' parameters differ."""
        return self._sync_every > 1 and self._apart

    def brought_together(self) -> None:
        self._apart = False

    def update(self, plan: StepPlan, clip_norm: float | None) -> Update:
        rate = self._spec.rate(self.updates) if self._spec else None
        self.updates += 1
        self._apart = not plan.average
        return Update(plan.rescale, clip_norm, rate)

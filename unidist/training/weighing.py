"""How much each batch weighs in a step: what a loader knows of it, what its arrays show, what the user says."""

from __future__ import annotations

import gc
import math
import sys
import zlib
from collections.abc import Callable
from typing import Any

from unidist.backend import Backend
from unidist.control.watch import WEEK, Watch
from unidist.data.nested import arrays_of
from unidist.data.tracking import BatchInfo, Tracker, refuse_mixed_padding, refuse_unequal_shares, rows_of, rows_said
from unidist.errors import RanksMissing, UsageError
from unidist.training.accumulation import Reduction, Schedule

# Seconds that a rank may come later than the others to a batch of its own making whose rows have a new shape.
PATIENCE = 60.0


class Weighing:
    """The batches that steps may be made of, and what they weigh."""

    def __init__(self, backend: Backend, watch: Watch, on_step: Callable[[BatchInfo | None, bool], None]) -> None:
        self._backend, self._watch, self._on_step = backend, watch, on_step
        self.batches = Tracker()

    def weigh(
        self,
        schedule: Schedule,
        batch: Any,
        weight: Any,
        reduction: Reduction,
        whole: bool,
        infos: list[BatchInfo] | None = None,
    ) -> tuple[BatchInfo | None, float]:
        """What a loader knows of this batch, and how many samples its loss is the mean of. The step is a `whole` one,
        or spelled out."""
        arrays = arrays_of(batch)
        other_axes, schedule.other_axes = schedule.other_axes, [tuple(array.shape[1:]) for array in arrays]
        infos = infos or self.batches.find(arrays, id(schedule))
        refuse_mixed_padding(infos)
        info = infos[0] if infos else None
        self._on_step(info, whole)
        if weight is not None:
            told = self._told(weight)
            if info is None and told:
                for lost in self.batches.outstanding():
                    _refuse_lost_padding(lost)
            if info is not None and 0 < info.real < info.rows:
                raise UsageError(
                    f"{info.rows - info.real} rows of this batch are padding, which the step leaves out, and weight= "
                    "may have counted them: use tail='keep' or 'drop'"
                )
            return info, told if info is None or info.real else 0.0
        counts = reduction == "mean" and (schedule.exchanges or not schedule.single)
        say = "step(…, weight=n)" if whole else "backward(loss, weight=n)"
        if info is not None:
            if 0 < info.real < info.rows and not any(int(array.shape[0]) == info.rows for array in arrays):
                raise UsageError(
                    f"{info.rows - info.real} of the {info.rows} samples of this batch are padding, and no array has "
                    "the samples in its first axis, so the step cannot leave them out: use tail='keep' or 'drop'"
                )
            if counts and not info.shown:
                raise UsageError(
                    f"the loader made this batch of {info.rows} samples, and its arrays have {rows_said(arrays)} rows, "
                    "so the number of samples that the loss is the mean of cannot be seen (a collate function that "
                    f"leaves samples out?): say {say}"
                )
            if schedule.exchanges and other_axes not in ([], schedule.other_axes):
                self._mention_lengths(schedule)
            if whole:
                self.batches.refuse_parts(arrays)
            if counts:
                refuse_unequal_shares(infos, schedule.exchanges, not schedule.single)
            if other_axes != schedule.other_axes:
                schedule.axes.add(repr(schedule.other_axes))
            return info, float(info.real)
        schedule.foreign_batches += 1
        if self.batches.padding_about(arrays):
            gc.collect()  # a batch may only be held by a cycle: of an error's frames, or of a data loader's iterator
        for about in self.batches.padding_about(arrays):
            raise UsageError(
                f"a batch was read, with {about.real} samples in {about.rows} rows on this rank, and this one may have "
                "been made of it: which of its rows are padding cannot be seen. Change batches inside the loss "
                f"function, use tail='drop', or say how many samples the loss is the mean of: {say}"
            )
        # Of an array whose first axis is not the samples' any more, it is another axis that changes with their number.
        for lost in self.batches.outstanding():
            _refuse_lost_padding(lost)
            if other_axes not in ([], schedule.other_axes):
                raise UsageError(
                    f"a batch of this pass, with {lost.real} samples on this rank and other numbers on others, did not "
                    "come to a step as it was, and this one may have been made of it. Change batches inside the loss "
                    f"function, or say how many samples the loss is the mean of: {say}"
                )
        if not counts:
            samples = float(arrays[0].shape[0]) if arrays else 1.0
        elif arrays:
            samples = float(rows_of(arrays))
        else:
            seen = "the batch holds no array" if whole else "the model was not called with an array inside forward()"
            raise UsageError(f"{seen}, so the number of samples that the loss is the mean of cannot be seen: say {say}")
        schedule.foreign_axes.add(repr(schedule.other_axes))
        # Ranks whose batches change may have any of the shapes that were seen.
        if schedule.compared and (len(schedule.foreign_axes) > 1 or not schedule.foreign_axes <= schedule.axes):
            self._agree_on_axes(schedule)
        return None, samples

    def _told(self, weight: Any) -> float:
        """The number of samples, which may be a tensor."""
        try:
            samples = float(self._backend.to_numpy(weight).item() if self._backend.is_tensor(weight) else weight)
        except (TypeError, ValueError):
            samples = math.nan
        if not 0 <= samples < math.inf:
            raise UsageError(f"weight is {weight!r}, it must be the number of samples that the loss is the mean of")
        return samples

    def _mention_lengths(self, schedule: Schedule) -> None:
        """Once. Rows of another length than before are usually sequences, and their loss may be a mean over tokens."""
        if not schedule.lengths_mentioned and self._backend.world.rank == 0:
            sys.stderr.write(
                "unidist: the rows of the batches vary in shape. A step weighs a batch by its number of rows; where "
                "the loss is a mean over tokens, say step(…, weight=tokens), and weight=len(x) where it is not.\n"
            )
        schedule.lengths_mentioned = True

    def compare_first(self, schedule: Schedule, known: bool, told: bool, samples: float) -> float:
        """The largest number of samples that any rank has in its first batch. Where these differ in another axis than
        the first, and no loader knows them, that one may be the samples', or the loss may be a mean over it."""
        axes = repr(schedule.other_axes)
        mine = {"samples": samples, "axes": 0 if told else zlib.crc32(axes.encode()), "known": known}
        everyone = self._watch.collectives.all_gather(mine)
        schedule.compared = True
        schedule.axes.add(axes)
        if len({answer["axes"] for answer in everyone} - {0}) > 1 and not all(answer["known"] for answer in everyone):
            raise self._uncountable(schedule)
        return float(max(answer["samples"] for answer in everyone))

    def _agree_on_axes(self, schedule: Schedule) -> None:
        """The rows of a batch that no loader knows have a new shape, or one of several: is it the same on all ranks?
        Not asked through the engine, since a rank that sees nothing new does not come here."""
        peers, seen = self._backend.world.peers, repr(schedule.other_axes)
        # Where shapes have changed before, every rank asks in each step, and may only be late.
        patience = WEEK if seen in schedule.axes else PATIENCE
        schedule.axes.add(seen)
        if peers is None:
            return
        try:
            everyone = peers.gather(f"axes {schedule.number}/{schedule.foreign_batches}", seen, patience)
        except RanksMissing:
            raise self._uncountable(schedule) from None
        if set(everyone) != {seen}:
            raise self._uncountable(schedule)

    def _uncountable(self, schedule: Schedule) -> UsageError:
        return UsageError(
            "the batches of the ranks differ in another axis than the first (here, the arrays have "
            f"{schedule.other_axes} after it), so how many samples or tokens the loss is the mean of cannot be seen: "
            "say it in each step, as in step(…, weight=len(x)) or backward(loss, weight=len(x))"
        )


def _refuse_lost_padding(info: BatchInfo) -> None:
    if info.padded:
        raise UsageError(
            f"a batch of this pass, with {info.real} samples in {info.rows} rows on this rank, did not come to a step "
            "as it was, and this one may have been made of it: which of its rows are padding cannot be seen. Change "
            "batches inside the loss function, or use tail='drop'. A rank that has nothing but padding may say weight=0"
        )

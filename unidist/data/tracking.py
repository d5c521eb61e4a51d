"""What a batch means to a training step, wherever the step meets it: read ahead, kept in a list, or changed on the way.

How much a batch weighs can be seen in it: that is the number of its rows. What cannot be seen is whether some rows are
padding, whether it ends its pass, and whether the ranks hold equally much. So batches are recognised by identity,
through any of the arrays in them, for as long as somebody holds them.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from unidist.data.nested import arrays_of, map_leaves
from unidist.errors import StateError, UsageError

if TYPE_CHECKING:
    from unidist.data.batch import Batch
    from unidist.data.order import Epoch

Place = tuple[int, int]  # (epoch, samples consumed in it, by all ranks)


@dataclass
class Pass:
    """One pass over a loader: the order of its samples, where there is one, and how far it has come."""

    loader: weakref.ref[Any]
    plan: Epoch | None = None
    counts: list[tuple[int, int]] | None = None  # (samples, rows) of each batch, where no plan tells them
    steps: int = 0  # batches that were handed out
    began: int = 0  # when its first batch was handed out, and its latest, in batches of all loaders
    touched: int = 0
    complete: bool = False  # the last one was
    evaluation: bool = False  # it was begun inside evaluate(), and no step was made of its batches
    entered: int = 0  # how often evaluate() had been entered when it was begun
    gathered: bool = False  # results of it were gathered, or their mean was taken
    before: Pass | None = field(default=None, repr=False)  # the loader's pass before it, whose results may be to come
    for_training: bool = False  # passes before it were
    made: int = 0  # training steps of its batches, or of unknown ones while it was the pass that was read last
    unrecognised: int = 0  # of these, steps of batches that no loader knows
    shares: bool = False  # whole steps have given back losses, which are parts of the global mean already
    handed_out: dict[int, _Tracked] = field(default_factory=dict, repr=False)  # that somebody may still hold
    walks: dict[int, list[int]] = field(default_factory=dict, repr=False)  # by user: [number of this walk, steps in it]

    @property
    def trained(self) -> bool:
        return self.made > 0 and not self.evaluation

    @property
    def alike(self) -> bool:
        """All its batches hold equally many samples, on all ranks, and no padding. All ranks say the same."""
        if self.plan is None:
            return False
        ends = [
            self.plan.counts(rank, step) for rank in (0, self.plan.batch.workers - 1) for step in (0, self.steps - 1)
        ]
        return len(set(ends)) == 1 and ends[0].real == ends[0].rows

    def held(self) -> list[_Tracked]:
        return [entry for entry in list(self.handed_out.values()) if not entry.released]

    def walk(self, user: int, info: BatchInfo) -> tuple[bool, bool]:
        """`user` makes a step of one of its batches: (whether a walk over them ends with it, whether it was its turn).

        Ranks may walk a list that they kept in orders of their own. The end of a walk is where nothing is left, and
        that is the same step on all of them."""
        number, steps = self.walks.setdefault(user, [1, 0])
        in_turn = info.number == steps
        steps += 1
        # Where there are as many steps as batches, and some batches are left, several steps are made of one: then it
        # cannot be seen which step is the last.
        ends = False
        if steps <= self.steps and (info.last or (self.complete and steps == self.steps)):
            ends = not any(entry.uses.get(user, 0) < number for entry in self.held())
        self.walks[user] = [number + 1, 0] if ends else [number, steps]
        return ends, in_turn

    def unending(self, user: int) -> bool:
        """Whether it has been read to its end, and where the steps of its batches end cannot be seen."""
        return self.complete and self.walks.get(user, [1, 0])[1] >= self.steps

    def waiting(self) -> list[Place]:
        """Where batches begin that no step was made of, and that somebody holds."""
        return [entry.info.begins_at for entry in self.held() if not entry.uses]

    def check_position(self) -> None:
        if self.unrecognised and self.made % self.steps:
            raise StateError(
                f"{self.steps} batches were read and {self.made} steps were made, of batches that were changed on the "
                "way: which of them are still to come cannot be seen. Save at the end of a pass, or change batches "
                "inside the loss function"
            )


def next_pass(passes: Sequence[Pass], coming: Pass) -> list[Pass]:
    """The passes of a loader that count for its position when another one begins."""
    coming.for_training = any(pass_.trained or pass_.for_training for pass_ in passes)
    if passes and not passes[-1].gathered:
        coming.before, passes[-1].before = passes[-1], None
    return [*(pass_ for pass_ in passes if pass_.waiting()), coming]


def reached(passes: Sequence[Pass], place: Place) -> Place:
    """Where training is, when the batches of these passes up to `place` were handed out: some may wait to be used."""
    waiting = []
    for pass_ in passes:
        begins = pass_.waiting() if pass_.trained or pass_.for_training else []
        if begins:
            pass_.check_position()
            waiting += [] if pass_.unrecognised else begins
    return min([*waiting, place])


class BatchInfo(NamedTuple):
    """One rank's part of a global batch, as a loader handed it out."""

    origin: Pass
    number: int  # in its pass
    batch: Batch
    rows: int  # as delivered
    real: int  # of these, samples; the others are padding and come last
    total: int  # samples on all ranks
    last: bool  # it ends the pass
    even: bool  # every rank holds the same number of samples
    begins_at: Place
    shown: bool = True  # its arrays have as many rows as it has samples, or a fixed number for each

    @property
    def padded(self) -> bool:
        return self.real != self.rows

    @property
    def special(self) -> bool:
        return self.last or self.padded or not self.even


OnBatch = Callable[["BatchInfo", Any], None]  # told before a batch is handed out, with the batch itself


@dataclass
class _Tracked:
    info: BatchInfo
    arrays: list[Any] = field(repr=False)
    uses: dict[int, int] = field(default_factory=dict)  # steps that were made of it, by user
    noticed: bool = False  # as lost
    count: int = 0  # of its arrays when it was handed out

    @property
    def released(self) -> bool:
        """Nobody but this record refers to any of its arrays. (Not every framework's arrays have weak references.)"""
        # Three references to each: the list, the loop's variable and the argument of getrefcount.
        return all(sys.getrefcount(array) <= 3 for array in self.arrays)


class Tracker:
    """The batches that a step may still be made of. `user` is whoever makes steps: a prepared model."""

    def __init__(self) -> None:
        self._tracked: deque[_Tracked] = deque()
        self._special: list[_Tracked] = []  # those that mean more than their rows
        self._by_array: dict[int, _Tracked] = {}  # by identity, since they are kept alive here
        self._lock = threading.Lock()  # loaders may be read by threads of the user's

    def hand_out(self, info: BatchInfo, batch: Any) -> None:
        arrays = arrays_of(batch)
        info = info._replace(shown=_shows(arrays, info.rows))
        tracked = _Tracked(info, arrays, count=len(arrays))
        info.origin.complete = info.origin.complete or info.last
        with self._lock:
            for _ in range(min(2, len(self._tracked))):  # more would be slow where the user keeps many of them
                self._forget_or_keep(self._tracked.popleft())
            if info.special:
                self._special = [entry for entry in self._special if self._matters(entry, info)] + [tracked]
            self._tracked.append(tracked)
            for array in tracked.arrays:
                before = self._by_array.get(id(array))
                if before is not None:  # an array that comes with every batch tells none of them apart
                    before.arrays = [other for other in before.arrays if other is not array]
                self._by_array[id(array)] = tracked
            info.origin.handed_out[id(tracked)] = tracked

    def _forget_or_keep(self, oldest: _Tracked) -> None:
        """A batch can be used for as long as somebody holds one of its arrays; the others need not be kept alive."""
        held = []
        while oldest.arrays:
            array = oldest.arrays.pop()
            if sys.getrefcount(array) > 2:  # this variable, and the argument
                held.append(array)
            else:
                self._by_array.pop(id(array), None)
        oldest.arrays = held
        if held:
            self._tracked.append(oldest)
        else:
            oldest.info.origin.handed_out.pop(id(oldest), None)

    @staticmethod
    def _matters(tracked: _Tracked, coming: BatchInfo) -> bool:
        """A batch that was not used may have been changed into something that cannot be recognised. It is remembered
        until its loader has ended another pass."""
        if not tracked.released:
            return True
        known, new = tracked.info.origin, coming.origin
        if known.evaluation and known.loader() is None:
            return False
        return not tracked.uses and not (coming.last and new is not known and new.loader == known.loader)

    def find(self, arrays: Sequence[Any], user: int) -> list[BatchInfo]:
        """What is known of the batches that these arrays, or some of them, came in. A step is being made of them."""
        found: dict[int, _Tracked] = {}
        for array in arrays:
            tracked = self._by_array.get(id(array))
            if tracked is not None:
                found[id(tracked)] = tracked
        for entry in found.values():
            entry.uses[user] = entry.uses.get(user, 0) + 1
        return [entry.info for entry in found.values()]

    def refuse_parts(self, arrays: Sequence[Any]) -> None:
        """An array that was left as it was tells how many rows its batch had, not how many were taken of the others."""
        others = [int(array.shape[0]) for array in arrays if id(array) not in self._by_array]
        known = [self._by_array[id(array)] for array in arrays if id(array) in self._by_array]
        for tracked in known if others else ():
            if len(known) < tracked.count and any(rows != tracked.info.rows for rows in others):
                raise UsageError(
                    f"some arrays of this batch are as the loader gave them, with {tracked.info.rows} rows, and others "
                    f"have {', '.join(map(str, sorted(set(others))))}, so the number of samples that the loss is the "
                    "mean of cannot be seen: take the same rows of all of them, or say step(…, weight=n)"
                )

    def outstanding(self) -> list[BatchInfo]:
        """Batches of training passes with padding or of uneven size that no step was made of."""
        with self._lock:
            special = list(self._special)
        return [
            entry.info
            for entry in special
            if entry.info.origin.trained
            and not entry.uses
            and (entry.info.padded or not entry.info.even)
            and (entry.info.origin.loader() is not None or not entry.released)
        ]

    def padding_about(self, arrays: Sequence[Any]) -> list[BatchInfo]:
        """Batches with padding that these arrays, which are unknown, may have been made of, beside those that are
        outstanding: used as they were, too, and still held; or read in a pass whose results nobody has asked for, as to
        compute features from them."""
        with self._lock:
            special = list(self._special)
        rows = {int(array.shape[0]) for array in arrays}
        return [
            entry.info
            for entry in special
            if entry.info.padded
            and entry.info.rows in rows
            and not entry.info.origin.gathered
            and not (entry.info.origin.trained and not entry.uses)
            and (not entry.released or (not entry.uses and entry.info.origin.loader() is not None))
        ]

    def lost_end(self) -> bool:
        """Whether, since the last call, the last batch of a training pass went without a step of its own: it was
        changed, or left out."""
        with self._lock:
            special = list(self._special)
        lost = [
            entry
            for entry in special
            if entry.info.last and entry.info.origin.trained and not entry.uses and not entry.noticed and entry.released
        ]
        for entry in lost:
            entry.noticed = True
        return bool(lost)


def _shows(arrays: Sequence[Any], rows: int) -> bool:
    """Whether the arrays that were made of so many samples still show how many they are: a collate function may have
    dropped some, or have joined what comes in other numbers. Several rows for each sample, and sequences with time in
    the first axis, are fine."""
    first = [int(array.shape[0]) for array in arrays]
    return (
        not arrays
        or any(length and length % rows == 0 for length in first)
        or all(len(array.shape) > 1 and int(array.shape[1]) == rows for array in arrays)
    )


def refuse_mixed_padding(infos: Sequence[BatchInfo]) -> None:
    if len({(info.rows, info.real) for info in infos}) > 1 and any(info.padded for info in infos):
        raise UsageError(
            "the arrays of this batch come from several batches, of which one holds padding: use tail='drop', or a "
            "batch size that divides"
        )


def refuse_unequal_shares(infos: Sequence[BatchInfo], of_ranks: bool, of_groups: bool) -> None:
    """Where one step is made of several batches, its loss has one weight: in the mean over the ranks, in the mean over
    the micro-batches of a group, or both."""
    ranks = {info.real / info.total for info in infos} if of_ranks else set()
    groups = {info.real / info.batch.per_worker for info in infos} if of_groups else set()
    if len(ranks) > 1 or len(groups) > 1:
        raise UsageError(
            "this step is made of several batches, of which this rank holds different shares ("
            + ", ".join(f"{info.real} of {info.total} samples" for info in infos)
            + "), so no weight fits the losses of all of them: use tail='drop', make a step of each, or let the loss "
            "be a sum, with reduction='sum'"
        )


def rows_said(arrays: Sequence[Any]) -> str:
    return ", ".join(map(str, sorted({int(array.shape[0]) for array in arrays})))


def rows_of(arrays: Sequence[Any]) -> int:
    """How many samples a batch of these arrays holds."""
    lengths = {int(array.shape[0]) for array in arrays}
    if len(lengths) > 1:
        raise UsageError(
            f"the arrays of this batch have {rows_said(arrays)} rows, so the number of samples that "
            "the loss is the mean of cannot be seen: say it, as in step(…, weight=len(x)) or "
            "backward(loss, weight=len(x))"
        )
    return lengths.pop()


def cut(value: Any, rows: int, keep: int) -> Any:
    """The first `keep` rows of every array that has `rows` of them; everything else as it is."""

    def first(leaf: Any) -> Any:
        shape = getattr(leaf, "shape", None)
        return leaf[:keep] if shape and shape[0] == rows else leaf

    return map_leaves(first, value)

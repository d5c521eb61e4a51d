"""Who takes part in the job, where each is, and which of them failed first. No sockets, no threads.

Causes come as data, and in the order of events: who raises says so before its connections close, and a process that was
killed is missed here before its peers have made an error of it. So the first report is the cause, and those that follow
are its echoes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from unidist.control.causes import Cause
from unidist.control.lineage import UNKNOWN, Lineage
from unidist.control.pulses import Pulses, whole
from unidist.control.values import Timer

SETTLING = 0.3  # seconds in which a better cause may still be reported
GRACE = 5.0  # seconds that the others have to leave an operation that one has broken off: they may all fail in it
MAX_CAUSE = 4000  # characters that are kept of a cause

LEAVE = "leave"  # the operation in which all ranks close their Strategy
CLOSED = (
    "has closed its Strategy while others were still at work: make the same number of steps, and call the same methods "
    "of the Strategy, on every rank"
)
ENDED = "ended in mid-training without closing its Strategy"
LOST = f"{ENDED}: it was killed, crashed or left by os._exit, or its host cannot be reached"


class _Member:
    together = 0  # operations of all ranks that it has begun
    inside = False  # the last of them: waiting in it, or having broken it off
    leaving = False  # that is to close its Strategy
    fatal = False  # it gave up in a way that nobody catches
    missed = False  # others are inside what it has broken off
    connected = True
    let_go: Callable[[str], None] | None = None  # answers it, while it waits at its end for those who may need it
    state = "open"  # then "left", "gave up", "exits", "failed", "lost"

    def __init__(self, group: str, role: str, rank: int, host: str, lineage: Lineage) -> None:
        self.group = group  # those who have met; a process may hold several Strategies
        self.role, self.rank, self.host, self.lineage = role, rank, host, lineage


class _Report(NamedTuple):
    member: _Member
    cause: Cause
    echo: bool = False  # its own error says that it lost another
    new: bool = False  # another one than the process had caught before

    @property
    def was_caught(self) -> bool:
        return self.member.state == "gave up" and not self.member.fatal

    @property
    def is_ending(self) -> bool:
        return self.member.state == "failed" or self.member.fatal


class Roll:
    """Members by the number of their connection. `announce` is called once, with the first cause, and `ended` when the
    process that it names is gone; `over` when the last worker has left after an error that it kept to itself."""

    def __init__(
        self,
        later: Timer,
        announce: Callable[[Cause], None],
        ended: Callable[[], None] = lambda: None,
        over: Callable[[], None] = lambda: None,
    ) -> None:
        self._later, self._announce, self._ended, self._over = later, announce, ended, over
        self.pulses = Pulses()
        self._members: dict[int, _Member] = {}
        self._reports: list[_Report] = []
        # Who wants to know of an earlier cause, and whether of one only that the job cannot survive.
        self._asking: list[tuple[_Member, bool, Callable[[Cause | None], None]]] = []
        self._early = False  # somebody has left before the others, and may be missed
        self.first: Cause | None = None
        self.met = False

    def beat(self, connection: int, said: Mapping[str, Any]) -> None:
        before, operation = self.pulses.beat(said)
        member = self._members.get(connection)
        if member is not None:
            if member.state == "open":
                member.together, member.inside = whole(said, "together"), bool(said.get("inside"))
                member.leaving = operation.rpartition(": ")[2] == LEAVE
            self._early |= member.leaving
            if self._early and (operation != LEAVE or before != LEAVE):
                self._look_for_deserters()

    # -- members -----------------------------------------------------------------------------------------------

    def enter(self, connection: int, group: str, role: str, rank: int, host: str, lineage: Lineage = UNKNOWN) -> None:
        """All ranks have met, and this is one of them. Who was there before belongs to an earlier Strategy."""
        gone = [number for number, member in self._members.items() if member.state != "open"]
        for number in gone:
            del self._members[number]
        if gone and not self._members and self.first is None:
            self._reports, self._early = [], False
        self._members[connection] = _Member(group, role, rank, host, lineage)
        self.met = True

    def rename(self, connection: int, rank: int) -> None:
        """The engine has numbered the ranks itself."""
        if connection in self._members:
            self._members[connection].rank = rank

    def goodbye(self, connection: int) -> None:
        self._depart(connection, "left")
        self._let_go()

    def exits(self, connection: int, together: int) -> None:
        """Its script has ended, and its Strategy was not closed. That is fine when the others do the same."""
        member = self._members.get(connection)
        if member is not None and member.state == "open":
            member.state, member.together, self._early = "exits", together, True
            self._look_for_deserters()

    def outlasts(self, connection: int, code: int, answer: Callable[[str], None]) -> None:
        """It is at the end of its process, did not close its Strategy, and the engine of the others would break without
        it. Answered when all are as far: "exits", or "gave up" if one of them did so. Answered with "failed" when one
        of the others needs what it will never do; and at once where it ends with an error."""
        member = self._members.get(connection)
        if member is None or member.state not in ("gave up", "exits"):
            return answer("failed")
        if code:
            member.state = "failed"
            self._settle(member, final=True)
            return answer("failed")
        member.let_go = answer
        self._let_go()

    def gives_up(
        self,
        connection: int,
        place: tuple[int, bool],
        cause: tuple[str, tuple[str, ...]],
        echo: bool,
        fatal: bool,
        answer: Callable[..., None],
    ) -> None:
        """An error has left its Strategy, which the script may catch. That is fine as long as nobody needs this one:
        the others may do the same, each in its time. Answered with the first cause, when there was one before; where
        the error is not the `echo` of another's, only if that one has ended the job.
        """
        member = self._members.get(connection)
        if member is None or member.state not in ("open", "gave up", "exits"):
            return answer(self.first)
        member.state, self._early = "gave up", True
        member.together, member.inside, member.fatal = *place, fatal
        if echo:
            self._name_who_ended(member)
        self._reports.append(_Report(member, _cause(member, *cause), echo))
        self._asking.append((member, not echo, answer))
        self._later(SETTLING, lambda: self._settle(member))
        self._look_for_deserters()

    def fails(
        self, connection: int, cause: tuple[str, tuple[str, ...]], echo: bool, answer: Callable[..., None]
    ) -> None:
        """It is about to end because of an error that nobody caught."""
        member = self._members.get(connection)
        if member is None or member.state in ("left", "lost"):
            return answer(self.first)
        member.state = "failed"
        if echo:
            self._name_who_ended(member)
        earlier = [each for each in self._reports if each.member is member]
        told = _cause(member, *cause)
        if not any(each.cause.what == told.what for each in earlier):  # else it counts from when it left the Strategy
            report = _Report(member, told, echo, new=bool(earlier) and not echo)
            self._reports = [*(each for each in self._reports if each.member is not member), report]
        self._asking.append((member, False, answer))
        self._later(SETTLING, lambda: self._settle(member, final=True))

    def _name_who_ended(self, survivor: _Member) -> None:
        """It has lost another: perhaps one whose script ended, as far as all others had come by their last beats."""
        for member in self._members.values():
            if member.group == survivor.group and member.state == "exits":
                self._report_end(member)

    def _report_end(self, member: _Member) -> None:
        if not any(report.member is member for report in self._reports):
            self._reports.append(_Report(member, _cause(member, ENDED)))

    def lose(self, connection: int) -> None:
        """Its connection is closed."""
        member = self._members.get(connection)
        if member is None:
            return
        waited = member.state == "exits" and member.let_go is not None  # else all had come, and it was let go
        member.connected, member.let_go = False, None
        if self.first is not None and (self.first.role, self.first.rank) == (member.role, member.rank):
            self._ended()
        if member.state == "open" or waited:
            self._depart(connection, "lost")
            self._reports.append(_Report(member, _cause(member, LOST)._replace(lost=True)))
            self._settle(member, final=True)
        elif member.state == "gave up":
            ours = [each for each in self._members.values() if each.group == member.group]
            if member.fatal:
                self._settle(member, final=True)
            elif self.first is None and not any(one.connected for one in ours if one.role == "worker"):
                for one in ours:
                    if one.state == "open":
                        one.state = "left"  # a service, which has nobody to serve any more
                self._over()
        self._let_go()

    def tell_first(self, answer: Callable[..., None]) -> None:
        """The end of another connection may be waiting to be read, beside the question."""

        def tell() -> None:  # nobody may have been left to announce it to: all have lost that one already
            ended = (report.cause for report in self._ordered() if report.member.state in ("failed", "lost"))
            answer(self.first or next(ended, None))

        self._later(0.0 if self.first else SETTLING, tell)

    def reports(self) -> list[Cause]:
        """Causes that were told, the likeliest first."""
        return [report.cause._replace(ending=report.is_ending) for report in self._ordered()]

    # -- the verdict -------------------------------------------------------------------------------------------

    def _depart(self, connection: int, state: str) -> None:
        member = self._members.get(connection)
        if member is not None:
            member.state = state

    def _ordered(self) -> list[_Report]:
        # sorted() keeps the order of arrival. A process that is gone without a word did not go because of another's
        # error, though it may be missed a moment later than that was told. Where a process fails of something new after
        # an error that it caught, nobody's caught error is the cause.
        new = any(report.new for report in self._reports)
        return sorted(self._reports, key=lambda each: (each.echo, new and each.was_caught, not each.cause.lost))

    def _settle(self, member: _Member, final: bool = False) -> None:
        """`final`: it is certain that this one will not go on, and the others cannot without it."""
        left_alone = any(
            each.group == member.group and (each.state == "open" or (each.state == "exits" and each.let_go is not None))
            for each in self._members.values()
        )
        if self.first is None and final and left_alone:
            ordered = [report for report in self._ordered() if report.member.group == member.group]
            if ordered:
                self.first = ordered[0].cause
                self._announce(self.first)
                self._let_go()
        waiting, self._asking = self._asking, []
        for asked, certain, answer in waiting:
            if asked is not member:
                self._asking.append((asked, certain, answer))
                continue
            ordered = [] if certain else self._ordered()
            earlier = self.first or (ordered[0].cause if ordered else None)
            own = earlier is not None and (earlier.role, earlier.rank) == (asked.role, asked.rank)
            answer(None if own else earlier)

    def _let_go(self) -> None:
        """Answer those who wait at their end, when all of their group do."""
        workers = [member for member in self._members.values() if member.role == "worker"]
        alive = {"open", "gave up", "exits"}
        busy = {
            worker.group for worker in workers if worker.connected and worker.state in alive and worker.let_go is None
        }
        gave_up = {worker.group for worker in workers if worker.state == "gave up"}
        for worker in workers:
            if worker.let_go is not None and (self.first is not None or worker.group not in busy):
                answer, worker.let_go = worker.let_go, None
                answer("failed" if self.first is not None else "gave up" if worker.group in gave_up else "exits")

    def _look_for_deserters(self) -> None:
        """Somebody has begun what one that left will never join; or stays in what that one has broken off; or has begun
        something else where another closes its Strategy."""
        if self.first is not None:
            return
        front: dict[str, tuple[int, bool]] = {}
        for each in self._members.values():
            if each.state in ("open", "exits"):  # of what has ended, steps may be queued that wait for the others
                at = each.together, each.inside and each.state == "open"
                front[each.group] = max(at, front.get(each.group, (0, False)))
        furthest = self._furthest()
        for member in self._members.values():
            if member.state == "open" and member.leaving and not member.missed:
                if furthest[member.group] > (member.together, False):
                    member.missed = True
                    self._later(GRACE, partial(self._look_again, member))
                continue
            if member.state not in ("exits", "gave up"):
                continue
            together, inside = front.get(member.group, (0, False))
            if together > member.together:
                return self._desert(member)
            if member.inside and inside and together == member.together and not member.missed:
                member.missed = True
                self._later(GRACE, partial(self._look_again, member))

    def _furthest(self) -> dict[str, tuple[int, bool]]:
        """How many operations any worker has begun, by group, and whether the last is another than to close the
        Strategy. Who closes it after fewer has others do something else in its place. (Steps may be queued, so that
        such a one may be closing its Strategy, too, by now.)"""
        found: dict[str, tuple[int, bool]] = {}
        for member in self._members.values():
            if member.state == "open" and member.role == "worker":
                found[member.group] = max((member.together, not member.leaving), found.get(member.group, (0, False)))
        return found

    def _look_again(self, member: _Member) -> None:
        alone = member.leaving and self._furthest().get(member.group, (0, False)) > (member.together, False)
        if member.state == "open" and alone and self.first is None:
            self._reports.append(_Report(member, _cause(member, CLOSED)))
            member.state = "failed"
            self._settle(member, final=True)
        waiting = any(
            each.state == "open" and each.group == member.group and each.inside and each.together == member.together
            for each in self._members.values()
        )
        if waiting and member.state == "gave up" and self.first is None:
            self._desert(member)
        member.missed = False

    def _desert(self, member: _Member) -> None:
        if member.state == "exits":
            self._report_end(member)
        member.state = "failed"
        self._settle(member, final=True)


def _cause(member: _Member, what: str, lines: tuple[str, ...] = ()) -> Cause:
    kept = tuple(line[:400] for line in lines[-30:])
    return Cause(member.role, member.rank, member.host, what[:MAX_CAUSE], kept, lineage=member.lineage)

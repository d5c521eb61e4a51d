"""Who takes part in the job, where each is, and which of them failed first. No sockets, no threads.

Causes come as data, and in the order of events: who raises says so before its connections close, and a process that was
killed is missed here before its peers have made an error of it. So the first report is the cause, and those that follow
are its echoes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from unidist.control.agreement import name_values
from unidist.control.calls import different, odd_one, read
from unidist.control.causes import Cause
from unidist.control.lineage import UNKNOWN, Lineage
from unidist.control.members import CLOSED, DIFFERENT, ENDED, LOST, SKIPPED, Member, Report, cause_of
from unidist.control.pulses import Pulses, whole
from unidist.control.values import Timer

SETTLING = 0.3  # seconds in which a better cause may still be reported
GRACE = 5.0  # seconds that the others have to leave an operation that one has broken off: they may all fail in it
LONG_STEP = 60.0  # seconds; a rank that went on after an error is not blamed for one that takes less

LEAVE = "leave"  # the operation in which all ranks close their Strategy


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
        self._members: dict[int, Member] = {}
        self._reports: list[Report] = []
        # Who wants to know of an earlier cause, and whether of one only that the job cannot survive.
        self._asking: list[tuple[Member, bool, Callable[[Cause | None], None]]] = []
        self._early = False  # somebody has left before the others, and may be missed
        self._comparing = False  # somebody stands still, and it is being looked at what the ranks have called
        self.first: Cause | None = None
        self.met = False

    def beat(self, connection: int, said: Mapping[str, Any]) -> None:
        before, operation = self.pulses.beat(said)
        member = self._members.get(connection)
        if member is not None:
            if member.state == "open":
                member.together, member.inside = whole(said, "together"), bool(said.get("inside"))
                member.leaving = operation.rpartition(": ")[2] == LEAVE
                member.calls = read(said, member.together, member.inside)
                moves, member.moves = member.moves, whole(said, "moves")
                member.heard += 1
                if member.inside and member.moves == moves and not self._comparing:
                    self._comparing = True
                    self._later(GRACE, partial(self._compare_calls, self._standing()))
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
        self._members[connection] = Member(group, role, rank, host, lineage)
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
        self._reports.append(Report(member, cause_of(member, *cause), echo))
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
        earlier = [report for report in self._reports if report.member is member]
        told = cause_of(member, *cause)
        if not any(
            report.cause.what == told.what for report in earlier
        ):  # else it counts from when it left the Strategy
            others = [report for report in self._reports if report.member is not member]
            self._reports = [*others, Report(member, told, echo, new=bool(earlier) and not echo)]
        self._asking.append((member, False, answer))
        self._later(SETTLING, lambda: self._settle(member, final=True))

    def _name_who_ended(self, survivor: Member) -> None:
        """It has lost another: perhaps one whose script ended, as far as all others had come by their last beats."""
        for member in self._members.values():
            if member.group == survivor.group and member.state == "exits":
                self._report_end(member)

    def _report_end(self, member: Member) -> None:
        if not any(report.member is member for report in self._reports):
            self._reports.append(Report(member, cause_of(member, ENDED)))

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
            self._reports.append(Report(member, cause_of(member, LOST)._replace(lost=True)))
            self._settle(member, final=True)
        elif member.state == "gave up":
            ours = [other for other in self._members.values() if other.group == member.group]
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

    def _ordered(self) -> list[Report]:
        # sorted() keeps the order of arrival. A process that is gone without a word did not go because of another's
        # error, though it may be missed a moment later than that was told. Where a process fails of something new after
        # an error that it caught, nobody's caught error is the cause.
        new = any(report.new for report in self._reports)
        return sorted(self._reports, key=lambda report: (report.echo, new and report.was_caught, not report.cause.lost))

    def _settle(self, member: Member, final: bool = False) -> None:
        """`final`: it is certain that this one will not go on, and the others cannot without it."""
        left_alone = any(
            other.group == member.group
            and (other.state == "open" or (other.state == "exits" and other.let_go is not None))
            for other in self._members.values()
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
        for other in self._members.values():
            if other.state in ("open", "exits"):  # of what has ended, steps may be queued that wait for the others
                at = other.together, other.inside and other.state == "open"
                front[other.group] = max(at, front.get(other.group, (0, False)))
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

    def _standing(self) -> dict[Member, tuple[int, int]]:
        """How often each worker has got somewhere so far, and was heard."""
        return {
            member: (member.moves, member.heard)
            for member in self._members.values()
            if member.role == "worker" and member.state == "open"
        }

    def _compare_calls(self, before: Mapping[Member, tuple[int, int]]) -> None:
        """Of workers that stand still since then, and were heard again: do they wait in different operations?"""
        self._comparing = False
        still = {member for member, (moves, heard) in before.items() if member.moves == moves and member.heard > heard}
        for group in {member.group for member in still}:
            ranks = {member.rank: member for member in still if member.group == group and member.state == "open"}
            found = different({rank: member.calls for rank, member in ranks.items()})
            if found is not None:
                odd = odd_one(found)
                ordered = sorted(found.items(), key=lambda item: odd not in item[1])
                self._stray(ranks[odd], DIFFERENT.format(who=name_values(dict(ordered))))
            elif self._went_on_alone(group, still) is not None:
                self._later(LONG_STEP, partial(self._blame_who_went_on, group, before))

    def _went_on_alone(self, group: str, still: Collection[Member]) -> Member | None:
        """A rank that skipped a step, where all of them stand still and others have made it."""
        workers = [m for m in self._members.values() if m.group == group and m.role == "worker" and m.state == "open"]
        skipped = [worker for worker in workers if worker.calls.skipped]
        waiting = all(worker in still and worker.inside for worker in workers)
        return skipped[0] if waiting and 0 < len(skipped) < len(workers) else None

    def _blame_who_went_on(self, group: str, before: Mapping[Member, tuple[int, int]]) -> None:
        still = {member for member, (moves, _) in before.items() if member.moves == moves}
        member = self._went_on_alone(group, still)
        if member is not None:
            self._stray(member, SKIPPED)

    def _stray(self, member: Member, what: str) -> None:
        """It will never meet the others again."""
        if self.first is None:
            self._reports.append(Report(member, cause_of(member, what)))
            member.state, member.found_out = "failed", True
            self._settle(member, final=True)

    def _furthest(self) -> dict[str, tuple[int, bool]]:
        """How many operations any worker has begun, by group, and whether the last is another than to close the
        Strategy. Who closes it after fewer has others do something else in its place. (Steps may be queued, so that
        such a one may be closing its Strategy, too, by now.)"""
        found: dict[str, tuple[int, bool]] = {}
        for member in self._members.values():
            if member.state == "open" and member.role == "worker":
                found[member.group] = max((member.together, not member.leaving), found.get(member.group, (0, False)))
        return found

    def _look_again(self, member: Member) -> None:
        alone = member.leaving and self._furthest().get(member.group, (0, False)) > (member.together, False)
        if member.state == "open" and alone:
            self._stray(member, CLOSED)
        waiting = any(
            other.state == "open" and other.group == member.group and other.inside and other.together == member.together
            for other in self._members.values()
        )
        if waiting and member.state == "gave up" and self.first is None:
            self._desert(member)
        member.missed = False

    def _desert(self, member: Member) -> None:
        if member.state == "exits":
            self._report_end(member)
        member.state = "failed"
        self._settle(member, final=True)

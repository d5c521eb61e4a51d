"""What the control server knows of one process that has met the others, and what it may be reported for."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from unidist.control.calls import Calls
from unidist.control.causes import Cause
from unidist.control.lineage import Lineage

MAX_CAUSE = 4000  # characters that are kept of a cause

CLOSED = (
    "has closed its Strategy while others were still at work: make the same number of steps, and call the same methods "
    "of the Strategy, on every rank"
)
ENDED = "ended in mid-training without closing its Strategy"
DIFFERENT = (
    "the ranks do not make the same calls, and wait for each other: {who}. Every rank must make the same calls in the "
    "same order: look for one that is under `if strategy.is_main`"
)
SKIPPED = (
    "went on after an error had left one of its steps, which the others have made, and now the ranks wait for each "
    "other in different steps: skip a batch on every rank, or on none"
)
LOST = f"{ENDED}: it was killed, crashed or left by os._exit, or its host cannot be reached"


class Member:
    together = 0  # operations of all ranks that it has begun
    calls = Calls()  # which
    moves = -1  # how often it got somewhere
    heard = 0  # how many beats have come
    found_out = False  # others have failed it, and it will not end by itself
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


class Report(NamedTuple):
    member: Member
    cause: Cause
    echo: bool = False  # its own error says that it lost another
    new: bool = False  # another one than the process had caught before

    @property
    def was_caught(self) -> bool:
        return self.member.state == "gave up" and not self.member.fatal

    @property
    def is_ending(self) -> bool:
        return (self.member.state == "failed" and not self.member.found_out) or self.member.fatal


def cause_of(member: Member, what: str, lines: tuple[str, ...] = ()) -> Cause:
    kept = tuple(line[:400] for line in lines[-30:])
    return Cause(member.role, member.rank, member.host, what[:MAX_CAUSE], kept, lineage=member.lineage)

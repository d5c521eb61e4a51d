"""What is known of one process of a job: where it was heard last, and why it failed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from unidist.control.lineage import UNKNOWN, Lineage

# How a process may have left: at its end, or because of an error, which it may keep to itself.
LEFT, GAVE_UP = "left", "left after an error"


_INSIDE = re.compile(r"(?<=\bsave|\bload): .*")  # collectives of unidist's own: nobody has called them by these names


def shown(operation: str) -> str:
    """What a process is in, as people call it."""
    return _INSIDE.sub("", operation)


class Beat(NamedTuple):
    """The last that was heard of one process. Ages are in seconds, by the server's clock."""

    role: str
    rank: int
    step: int  # that was begun last
    operation: str
    moves: int  # how often it got somewhere; where ranks go in lockstep, equal in the same place
    waits: bool  # it is inside an operation that needs the others
    paused: bool  # it said that no progress is to be expected for a while
    silent: float  # since it was last heard
    stuck: float  # since it last got anywhere; 0 for one that left, or is busy with something that takes its time

    @property
    def excuses(self) -> bool:
        """The others may have to wait for this one."""
        return self.paused and not self.waits and self.operation not in (LEFT, GAVE_UP)


def called(role: str, rank: int) -> str:
    """A process as people call it."""
    return f"rank {rank}" if role == "worker" else "the scheduler" if role == "scheduler" else f"{role} {rank}"


class Cause(NamedTuple):
    """One process that failed, as it or its connection told it."""

    role: str
    rank: int
    host: str
    what: str  # "ValueError: no such file"
    lines: tuple[str, ...] = ()  # the last of its traceback
    lost: bool = False  # nothing was told: its connection ended
    ending: bool = False  # its process is about to end, by an error or an exit code that nobody has caught
    lineage: Lineage = UNKNOWN

    @property
    def who(self) -> str:
        return f"{called(self.role, self.rank)} on {self.host}"

    def __str__(self) -> str:
        return f"{self.who}: {self.what}"

    def as_data(self) -> dict[str, Any]:
        return self._asdict()

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> Cause:
        space, pids = data["lineage"]
        return Cause(**{**data, "lines": tuple(data["lines"]), "lineage": Lineage(space, tuple(pids))})

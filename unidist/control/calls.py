"""What each rank has called last, and whether ranks wait for each other in different calls. No sockets, no threads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from unidist.control.values import Refused

KEPT = 8  # calls that a heartbeat tells of
SHOWN = 100  # characters of each
STEP = "step"


class Calls(NamedTuple):
    """The operations of all ranks are numbered on each rank in the order in which it begins them. Most are steps, so
    only the last ones that are something else have to be told."""

    begun: int = 0  # how many operations this rank has begun
    others: Mapping[int, str] = {}  # the last ones that are no steps, by their numbers
    inside: bool = False  # it has not finished the last one
    skipped: bool = False  # an error has left its last step, and it has finished nothing since

    def at(self, number: int) -> str | None:
        """What this rank did as its operation of that number; None where that is not known, or yet to come."""
        known_from = min(self.others) if len(self.others) >= KEPT else 1
        return self.others.get(number, STEP) if known_from <= number <= self.begun else None

    @property
    def waits_in(self) -> int | None:
        """The number of the call that it is inside of, if that is no step."""
        return self.begun if self.inside and self.begun in self.others else None


def read(said: Mapping[str, Any], begun: int, inside: bool) -> Calls:
    """From a heartbeat, which may come from anyone."""
    others = said.get("calls", [])
    if not isinstance(others, list) or len(others) > KEPT:
        raise Refused(f"calls must be a list of at most {KEPT}")
    for call in others:
        if not isinstance(call, list) or [type(part) for part in call] != [int, str]:
            raise Refused("a call must be a number and a text")
        if len(call[1]) > SHOWN or not call[1].isprintable():
            raise Refused("the text of a call must be short and printable")
    return Calls(begun, {number: text for number, text in others}, inside, bool(said.get("skipped")))


def different(calls: Mapping[int, Calls]) -> dict[str, list[int]] | None:
    """By rank: who did what in an operation that one of them is still inside of, and that others began as something
    else. What all have returned from is no reason to wait, however they called it."""
    for number in sorted({made.waits_in for made in calls.values() if made.waits_in is not None}):
        found: dict[str, list[int]] = {}
        for rank, made in calls.items():
            what = made.at(number)
            if what is not None:
                found.setdefault(what, []).append(rank)
        if len(found) > 1:
            return found
    return None


def odd_one(found: Mapping[str, list[int]]) -> int:
    """The rank to name: of the fewest, and rather one that does something else than a step."""
    return min(found.items(), key=lambda item: (len(item[1]), item[0] == STEP, item[1]))[1][0]

"""What each rank has called last, and the first call in which ranks differ. No sockets, no threads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from unidist.control.values import Refused

KEPT = 8  # calls that a heartbeat tells of
SHOWN = 200  # characters of each
STEP = "step"


class Calls(NamedTuple):
    """The operations of all ranks are numbered on each rank in the order in which it begins them. Most are steps, so
    only the last ones that are something else have to be told."""

    begun: int = 0  # how many operations this rank has begun
    others: Mapping[int, str] = {}  # the last ones that are no steps, by their numbers
    skipped: int = 0  # steps that an error has left on this rank, and that the script went on without

    def at(self, number: int) -> str | None:
        """What this rank did as its operation of that number; None where that is not known, or yet to come."""
        known_from = min(self.others) if len(self.others) >= KEPT else 1
        return self.others.get(number, STEP) if known_from <= number <= self.begun else None


def read(said: Mapping[str, Any], begun: int) -> Calls:
    """From a heartbeat, which may come from anyone."""
    others, skipped = said.get("calls", []), said.get("skipped", 0)
    if not isinstance(others, list) or len(others) > KEPT or not isinstance(skipped, int):
        raise Refused(f"calls must be a list of at most {KEPT}, and skipped a number")
    for call in others:
        if not (isinstance(call, list) and [type(part) for part in call] == [int, str] and len(call[1]) <= SHOWN):
            raise Refused("a call must be a number and a short text")
    return Calls(begun, {number: text for number, text in others}, skipped)


def first_difference(calls: Mapping[int, Calls]) -> dict[str, list[int]] | None:
    """By rank: who did what in the first operation that was not the same on all of them."""
    for number in sorted({number for made in calls.values() for number in made.others}):
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

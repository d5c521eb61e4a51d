"""Who is expected at a meeting: the workers, and the services that an engine has beside them (servers, a scheduler)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from unidist.control.agreement import name_ranks
from unidist.world import World


class WentOn(Exception):
    """The process that should host the meeting has started its engine without one: it is not ours."""


@dataclass(frozen=True)
class Company:
    """The processes of a job beside its workers, as a backend knows them. They take part in the meeting."""

    services: Mapping[str, int] = field(default_factory=dict)  # how many of each role
    # The role that has the master's address: its process hosts the meeting where no launcher of ours does.
    host: str = "worker"
    tells: Mapping[str, Any] = field(default_factory=dict)  # what this process wants the workers to know
    # Asked while nobody hosts the meeting: what can be seen instead, or "". May raise `WentOn`.
    look: Callable[[], str] = lambda: ""
    hint: str = ""  # for a person who reads that a service is missing


class Roster:
    """Everyone has a seat: workers by their rank, then the services, role by role."""

    def __init__(self, world: World, company: Company) -> None:
        counts = {"worker": world.world_size, **company.services}
        self._seats: dict[str, range] = {}
        for role, count in counts.items():
            self._seats[role] = range(self.size, self.size + count)
        self.role, self._rank = world.role, world.rank
        self.only_workers = not company.services

    @property
    def size(self) -> int:
        return max((seats.stop for seats in self._seats.values()), default=0)

    @property
    def shape(self) -> str:
        """How many of each, as people say it: "2 workers, 1 server, 1 scheduler"."""
        if self.only_workers:
            return str(self.size)
        return ", ".join(f"{len(seats)} {role}{'s' * (len(seats) != 1)}" for role, seats in self._seats.items())

    def seats(self, role: str) -> range:
        return self._seats.get(role, range(0))

    @property
    def seat(self) -> int:
        """This process's own; -1: any that its role has."""
        seats = self.seats(self.role)
        if len(seats) == 1:
            return seats[0]
        return seats[self._rank] if 0 <= self._rank < len(seats) else -1

    @property
    def name(self) -> str:
        """This process."""
        return self.names([self.seat]) if self.seat >= 0 else f"a {self.role} without a number"

    def names(self, seats: Iterable[int]) -> str:
        """ "ranks 0-2, server 1 and the scheduler"."""
        wanted, parts = set(seats), []
        for role, role_seats in self._seats.items():
            numbers = [number for number, seat in enumerate(role_seats) if seat in wanted]
            if numbers and role != "worker" and len(role_seats) == 1:
                parts.append(f"the {role}")
            elif numbers:
                parts.append(name_ranks(numbers, "rank" if role == "worker" else role))
        return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts) or "nobody"

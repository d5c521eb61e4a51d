"""A job as the control server's roll sees it: by events alone, with a clock of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unidist.control.calls import Calls
from unidist.control.causes import Cause
from unidist.control.roll import GRACE, Roll


class Job:
    """Ranks whose connections are numbered as they are."""

    def __init__(self, size: int = 2, services: int = 0) -> None:
        self.now = 0.0
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self.announced: list[Cause] = []
        self.answers: list[Cause | None] = []
        self.over = 0
        self.roll = Roll(self._later, self.announced.append, over=self._count)
        for rank in range(size):
            self.roll.enter(rank, "job", "worker", rank, "here")
        for number in range(services):
            self.roll.enter(size + number, "job", "server", number, "here")

    def _count(self) -> None:
        self.over += 1

    def _later(self, after: float, call: Callable[[], None]) -> Callable[[], None]:
        self._timers.append((self.now + after, call))
        return lambda: None

    def passes(self, seconds: float) -> None:
        self.now += seconds
        while due := [each for each in self._timers if each[0] <= self.now]:
            for each in due:
                self._timers.remove(each)
                each[1]()

    def at(self, rank: int, together: int, inside: bool = False, operation: str = "step", **more: Any) -> None:
        said: dict[str, Any] = {"role": "worker", "rank": rank, "step": 0, "operation": operation, "moves": 0}
        self.roll.beat(rank, {**said, "together": together, "inside": inside, **more})

    def stand(self, *ranks: Calls, moves: int = 0, seconds: float = 3 * GRACE) -> None:
        """For a while they tell the same in each beat, once a second."""
        until = self.now + seconds
        while self.now < until:
            for rank, made in enumerate(ranks):
                calls = [list(call) for call in made.others.items()]
                self.at(rank, made.begun, made.inside, calls=calls, skipped=made.skipped, moves=moves)
            self.passes(1.0)

    def gives_up(self, rank: int, together: int, inside: bool = False, echo: bool = False, fatal: bool = False) -> None:
        self.roll.gives_up(rank, (together, inside), (f"error of {rank}", ()), echo, fatal, self.answers.append)

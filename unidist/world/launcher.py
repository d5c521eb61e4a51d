"""What starts the processes of a job, as it can be told from the environment of one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unidist.world.variables import Variables
    from unidist.world.world import World


@dataclass(frozen=True)
class Outer:
    """How many processes a launcher has started, and how to start a script with it and without `unidist run`."""

    name: str  # as people call it
    marker: str  # a variable that only its processes have
    count: Callable[[Mapping[str, str]], int]  # of processes that it has started
    shown: tuple[str, ...]  # the variables that tell the user why
    instead: str  # "`horovodrun … python {script}`"


@dataclass(frozen=True)
class Launcher(Outer):
    """An engine's own launcher. It is looked for after torchrun, and before the launchers of clusters."""

    # Returns None where the marker is not there; what is partial or contradicts itself is a `WorldError`.
    detect: Callable[[Variables], World | None]
    # A regular expression for the variables that say who a process is, which jobs that it starts must not inherit.
    private: str


def whole_number(text: str | None) -> int:
    """The upper end of 3 or 1:3; 0 where that cannot be read."""
    last = (text or "").rpartition(":")[2].strip()
    return int(last) if last.isdecimal() else 0


def number_in(name: str) -> Callable[[Mapping[str, str]], int]:
    """A `count` that is the value of one variable."""
    return lambda env: whole_number(env.get(name))

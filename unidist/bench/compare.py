"""Times contestants in turn, round after round, and tells how each compares with the first."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple


class Line(NamedTuple):
    """One contestant: median time of a step, and median and quartiles of its ratio to the first, round by round."""

    name: str
    milliseconds: float
    ratio: float
    low: float
    high: float


def compare(
    contestants: Mapping[str, Callable[[int], None]],
    *,
    rounds: int,
    steps: int,
    barrier: Callable[[], None],
    progress: Callable[[str], None] = lambda text: None,
) -> list[Line]:
    """`contestants[name](steps)` does so many steps. Every rank calls this; the times are this rank's."""
    names = list(contestants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        contestants[name](steps)  # warm up
    for round_number in range(rounds):
        for position in range(len(names)):
            name = names[(position + round_number) % len(names)]  # nobody always goes first
            barrier()
            begin = time.perf_counter()
            contestants[name](steps)
            barrier()
            seconds[name].append((time.perf_counter() - begin) / steps)
        progress(f"round {round_number + 1} of {rounds}")
    lines = []
    for name in names:
        ratios = [duration / first for duration, first in zip(seconds[name], seconds[names[0]], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if rounds > 1 else ratios * 3
        lines.append(Line(name, statistics.median(seconds[name]) * 1e3, middle, low, high))
    return lines


def table(lines: list[Line], title: str) -> str:
    width = max(len(line.name) for line in lines)
    rows = [f"{title}  ({machine()})", f"{'':{width}}  ms/step   ratio   quartiles"]
    rows += [
        f"{line.name:{width}}  {line.milliseconds:7.3f}   {line.ratio:5.3f}   {line.low:.3f} to {line.high:.3f}"
        for line in lines
    ]
    return "\n".join(rows)


def machine() -> str:
    return f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}, Python {platform.python_version()}"

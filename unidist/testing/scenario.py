"""Promise 7 from inside: a rank that goes wrong in a named way while the others are busy together."""

from __future__ import annotations

import os
import signal
import sys

from unidist import Strategy


def main(scenario: str) -> None:
    with Strategy() as strategy:
        victim = strategy.world_size - 1
        for step in range(1000000):
            strategy.all_reduce(step, "sum")
            if step < 3 or strategy.rank != victim:
                continue
            if scenario == "raises":
                raise RuntimeError("the victim's own error")
            if scenario == "exits":
                sys.exit(7)
            if scenario == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])

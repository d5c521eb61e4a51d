"""What `agree` costs: `python tests/agree_cost.py [ranks]`."""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from itertools import chain

from project import ROOT

sys.path.insert(0, str(ROOT))

from unidist.control import Control, ControlServer, agree


def _agree_often(url: str, token: str, rank: int, size: int, rounds: int) -> list[float]:
    control, times = Control(url, token), []
    for sequence in range(rounds):
        before = time.perf_counter()
        agree(control, sequence, rank, size, "all_reduce mean float32 (1024, 1024)", 60)
        times.append(time.perf_counter() - before)
    return times[rounds // 10 :]


def agree_cost(size: int = 2, rounds: int = 2000) -> list[float]:
    """Seconds that each `agree` took, over processes of their own, in order of size."""
    context = multiprocessing.get_context("spawn")
    with ControlServer() as server, context.Pool(size) as pool:
        jobs = [(server.url, server.token, rank, size, rounds) for rank in range(size)]
        return sorted(chain.from_iterable(pool.starmap(_agree_often, jobs, chunksize=1)))


if __name__ == "__main__":
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    seconds = agree_cost(ranks)
    low, high = seconds[len(seconds) // 20], seconds[-len(seconds) // 20]
    median = statistics.median(seconds)
    print(f"agree at {ranks} ranks: {median * 1e3:.2f} ms, 90 % from {low * 1e3:.2f} to {high * 1e3:.2f}")

"""What two of the safeguards cost, on two ranks that train the example's model.

python tests/costs.py drift torch                 comparing the parameters over ranks, as a share of the time
python tests/costs.py queue mxnet --servers 1     a bound on the steps that are queued, against none
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import islice

from project import ROOT

SECONDS = 20.0  # of training, to see what share of it the comparisons take
ROUNDS, STEPS = 15, 600  # so many that the queue is full several times in each round


def drift(strategy, step, loader) -> None:
    from unidist.training.drift import DriftCheck

    spent: list[float] = []
    compare = DriftCheck.compare

    def timed(*arguments: object) -> None:
        began = time.perf_counter()
        compare(*arguments)  # type: ignore[arg-type]
        spent.append(time.perf_counter() - began)

    DriftCheck.compare = timed  # type: ignore[method-assign]
    began, steps = time.perf_counter(), 0
    while not strategy.all_reduce(time.perf_counter() - began > SECONDS, "max"):
        for x, y in loader:
            loss = step(x, y)
            steps += 1
    strategy.mean(loss)  # what was queued is done
    took = time.perf_counter() - began
    strategy.print(
        f"{steps} steps in {took:.1f} s, {len(spent)} comparisons of {sum(spent) / len(spent) * 1e3:.2f} ms each: "
        f"{sum(spent) / took:.2%} of the time"
    )


def queue(strategy, step, loader) -> None:
    from unidist.bench.compare import compare, table
    from unidist.training import pace

    batches, bounded, unbounded = endless(loader), strategy._backend.pace, pace.Pace(lambda losses: None)

    def with_pace(chosen: object) -> Callable[[int], None]:
        def run(steps: int) -> None:
            strategy._backend.pace = chosen
            for x, y in islice(batches, steps):
                loss = step(x, y)
            strategy.mean(loss)

        return run

    contestants = {"no bound": with_pace(unbounded), "bound": with_pace(bounded)}
    lines = compare(contestants, rounds=ROUNDS, steps=STEPS, barrier=strategy.barrier)
    strategy.print(table(lines, f"{strategy.backend}, 2 processes, {ROUNDS} rounds of {STEPS} steps"))


def endless(loader):
    while True:
        yield from loader


def train(measure) -> None:
    import digits
    import models
    import unidist

    with unidist.Strategy() as strategy:
        zoo = models.load(strategy.framework)
        model, optimizer = strategy.prepare(zoo.cnn(0), unidist.SGD(lr=0.01))
        step = strategy.train_step(model, optimizer, lambda m, x, y: zoo.cross_entropy(m(x), y))
        measure(strategy, step, strategy.loader(digits.load()[0], global_batch=48))


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    if "UNIDIST_RANK" in os.environ:
        train({"drift": drift, "queue": queue}[what])
    else:
        backend, *more = rest
        paths = os.pathsep.join(map(str, (ROOT, ROOT / "examples")))
        run = [sys.executable, "-m", "unidist", "run", "--backend", backend, "--nproc", "2", *more, __file__, what]
        sys.exit(subprocess.call(run, env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}))

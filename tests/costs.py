"""What three of the safeguards cost, on two ranks.

python tests/costs.py drift torch                 comparing the parameters over ranks, as a share of the time
python tests/costs.py queue mxnet --servers 1     a bound on the steps that are queued, against none
python tests/costs.py meeting torch               the meeting of the ranks, which come at the same moment
"""

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from subprocess import DEVNULL, PIPE

from project import ROOT, free_port

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


def meeting() -> None:
    """The ranks wait for each other in a folder first, with the framework imported, so that nothing else counts."""
    import importlib

    import unidist
    from unidist import registry
    from unidist.control.watch import Watch

    plugin = registry.choose(None)[0]
    for module in ("numpy", plugin.backend.partition(":")[0]):
        importlib.import_module(module)
    began, begin, meet = 0.0, Watch.__init__, Watch.meet
    folder, rank = Path(os.environ["COSTS_FOLDER"]), os.environ.get("UNIDIST_RANK") or os.environ["RANK"]

    def timed_begin(*arguments: object) -> None:
        nonlocal began
        (folder / rank).touch()
        while len(list(folder.iterdir())) < 2:
            time.sleep(0.0005)
        began = time.perf_counter()
        begin(*arguments)  # type: ignore[arg-type]

    def timed_meet(watch: Watch) -> object:
        world = meet(watch)
        print(f"{(time.perf_counter() - began) * 1e3:.1f} ms", flush=True)
        return world

    Watch.__init__, Watch.meet = timed_begin, timed_meet  # type: ignore[method-assign, assignment]
    with unidist.Strategy():
        pass


def meetings(backend: str) -> int:
    sys.path.insert(0, str(ROOT))
    from unidist.launch.environments import interpreter_for

    python, variables = interpreter_for(backend)
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "backends")))
    env = {**os.environ, **variables, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "UNIDIST_BACKEND": backend}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # users have their bytecode compiled
    launcher = [sys.executable, "-m", "unidist", "run", "--backend", backend, "--nproc", "2", __file__, "meeting"]
    took: dict[str, list[float]] = {"unidist run": [], "by hand": []}
    for _ in range(ROUNDS):
        for how, found in took.items():
            with tempfile.TemporaryDirectory() as folder:
                env |= {"COSTS_FOLDER": folder, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
                if how == "by hand":
                    numbered = [{**env, "RANK": str(n), "LOCAL_RANK": str(n), "WORLD_SIZE": "2"} for n in range(2)]
                    ranks = [([python, __file__, "meeting"], variables) for variables in numbered]
                else:
                    ranks = [(launcher, env)]
                jobs = [subprocess.Popen(c, env=e, stdout=PIPE, stderr=DEVNULL, text=True) for c, e in ranks]
                printed = "".join(job.communicate(timeout=120)[0] for job in jobs)
            found += [float(number) for number in re.findall(r"([\d.]+) ms", printed)]
    for how, found in took.items():
        low, middle, high = statistics.quantiles(found)
        print(f"{how:12} {middle:6.1f} ms  ({low:.1f} to {high:.1f}), {len(found)} ranks")
    return 0


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
    if "COSTS_FOLDER" in os.environ:
        meeting()
    elif "UNIDIST_RANK" in os.environ:
        train({"drift": drift, "queue": queue}[what])
    else:
        backend, *more = rest
        if what == "meeting":
            sys.exit(meetings(backend))
        paths = os.pathsep.join(map(str, (ROOT, ROOT / "examples")))
        run = [sys.executable, "-m", "unidist", "run", "--backend", backend, "--nproc", "2", *more, __file__, what]
        sys.exit(subprocess.call(run, env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}))

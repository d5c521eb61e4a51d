"""From the command to the first collective: as the engine itself has it, and by `unidist run`.

A backend brings a module, named in its `Plugin.bench_launch`, with

FIRST_COLLECTIVE                      a script that ends after one collective, which rank 0 reports by `FIRST <time>`
starts(python, script, nproc, port)   name -> the processes to start, each a command and what it adds to the
                                      environment; the first name is the one to compare with, the port is free
"""

from __future__ import annotations

import importlib
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from textwrap import indent

from unidist.backend import Plugin
from unidist.bench.compare import machine
from unidist.errors import LaunchError, UsageError
from unidist.launch.environments import interpreter_for
from unidist.output import Progress

TIMEOUT = 300.0
Start = tuple[list[str], dict[str, str]]


def main(plugin: Plugin, nproc: int, rounds: int, options: Sequence[str]) -> None:
    if plugin.bench_launch is None:
        raise UsageError(
            f"backend {plugin.name!r} brings no way of its own to start a job, to compare `unidist run` with"
        )
    module = importlib.import_module(plugin.bench_launch)
    python, variables = interpreter_for(plugin.name)
    env = {**os.environ, **variables, "OMP_NUM_THREADS": "1"}
    run = [sys.executable, "-m", "unidist", "run", "--standalone", f"--backend={plugin.name}", f"--nproc={nproc}"]
    run += [f"--option={option}" for option in options]
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "first.py"
        script.write_text(module.FIRST_COLLECTIVE)

        def starts() -> dict[str, list[Start]]:
            first, *rest = module.starts(python, str(script), nproc, _free_port()).items()
            return dict([first, ("unidist run", [([*run, str(script)], {})]), *rest])

        names = list(starts())
        turns = [names[(turn + place) % len(names)] for turn in range(rounds) for place in range(len(names))]
        seconds: dict[str, list[float]] = {name: [] for name in names}
        with Progress(len(turns), label="starts") as bar:
            for name in bar.over(turns):
                seconds[name].append(_until_first(name, starts()[name], env, Path(folder)))
    print(f"to the first all-reduce, {plugin.name}, {nproc} processes, {rounds} rounds  ({machine()})")
    print(f"             seconds   over {names[0]:<12}   quartiles")
    for name, times in seconds.items():
        over = [mine - theirs for mine, theirs in zip(times, seconds[names[0]], strict=True)]
        low, middle, high = statistics.quantiles(over, n=4)
        print(f"{name:<12} {statistics.median(times):8.2f} {middle:+19.2f}   {low:+.2f} to {high:+.2f}")


def natively_or_by_strategy(native: str) -> str:
    """A FIRST_COLLECTIVE for engines that find their ranks under `unidist run` by Strategy only. `native` is the code
    for elsewhere, which sets rank, size and total, the sum of a one from each rank."""
    ours = "import unidist\nstrategy = unidist.Strategy()\nrank, size = strategy.rank, strategy.world_size\n"
    ours += 'total = strategy.all_reduce(1.0, "sum")\n'
    return (
        "import os, time\n"
        f'if "UNIDIST_RANK" in os.environ:\n{indent(ours, "    ")}else:\n{indent(native, "    ")}'
        'assert total == size\nif rank == 0:\n    print("FIRST", time.time(), flush=True)\n'
        'if "UNIDIST_RANK" in os.environ:\n    strategy.close()\n'
    )


def ranks_by_hand(command: list[str], nproc: int, port: int) -> list[Start]:
    """For engines that read torch's variables."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(nproc)}
    return [(command, {**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(nproc)]


def _until_first(name: str, starts: Sequence[Start], env: dict[str, str], folder: Path) -> float:
    """In seconds. All of the processes have ended afterwards, also when one of them fails."""
    outputs = [folder / f"output-{number}" for number in range(len(starts))]
    begin = time.time()
    started = []
    try:
        for (command, extra), output in zip(starts, outputs, strict=True):
            with output.open("w") as stream:
                started.append(subprocess.Popen(command, env={**env, **extra}, stdout=stream, stderr=subprocess.STDOUT))
        while any(process.poll() is None for process in started) and not any(process.poll() for process in started):
            if time.time() > begin + TIMEOUT:
                break
            time.sleep(0.05)
    finally:
        failed = any(process.poll() for process in started)  # by itself: the others are ended now
        unfinished = [process for process in started if process.poll() is None]
        for process in unfinished:
            process.terminate()  # `unidist run` and the like end what they have started
        for process in unfinished:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    said = "".join(output.read_text(errors="replace") for output in outputs)
    found = re.search(r"FIRST (\S+)", said)
    if found is None or unfinished or any(process.returncode for process in started):
        why = "failed" if failed or not unfinished else f"did not end within {TIMEOUT:g} s"
        raise LaunchError(f"{name} {why}; its processes said:\n{said}")
    return float(found.group(1)) - begin


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

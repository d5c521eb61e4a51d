"""From the command to the first collective: by hand, by `unidist run`, by the engine's own launcher."""

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
from collections.abc import Callable
from pathlib import Path

from unidist.backend import Plugin
from unidist.bench.compare import machine
from unidist.errors import LaunchError
from unidist.launch.environments import interpreter_for

TIMEOUT = 300.0


def main(plugin: Plugin, nproc: int, rounds: int) -> None:
    module = importlib.import_module(f"{plugin.bench}_launch")
    python, variables = interpreter_for(plugin.name)
    env = {**os.environ, **variables, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "first.py"
        script.write_text(module.FIRST_COLLECTIVE)
        name, native = module.native_launcher(python, nproc, _free_port())
        ours = [sys.executable, "-m", "unidist", "run", f"--backend={plugin.name}", f"--nproc={nproc}"]
        contestants: dict[str, Callable[[], float]] = {
            "by hand": lambda: _by_hand([python, str(script)], nproc, env),
            "unidist run": lambda: _started([*ours, str(script)], env),
            name: lambda: _started([*native, str(script)], env),
        }
        seconds: dict[str, list[float]] = {each: [] for each in contestants}
        for number in range(rounds):
            order = list(contestants)
            for each in order[number % 3 :] + order[: number % 3]:
                seconds[each].append(contestants[each]())
            if sys.stderr.isatty():
                print(f"\rround {number + 1} of {rounds}", end="", file=sys.stderr, flush=True)
    print(f"to the first all-reduce, {plugin.name}, {nproc} processes, {rounds} rounds  ({machine()})")
    print("             seconds   over by hand   quartiles")
    for each, own in seconds.items():
        over = [mine - by_hand for mine, by_hand in zip(own, seconds["by hand"], strict=True)]
        low, middle, high = statistics.quantiles(over, n=4)
        print(f"{each:<12} {statistics.median(own):8.2f} {middle:+14.2f}   {low:+.2f} to {high:+.2f}")


def _started(command: list[str], env: dict[str, str]) -> float:
    begin = time.time()
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT)
    return _first(done.stdout, done.stderr) - begin


def _by_hand(command: list[str], nproc: int, env: dict[str, str]) -> float:
    begin = time.time()
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(nproc)}
    ranks = [
        subprocess.Popen(
            command,
            env={**env, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(nproc)
    ]
    outputs = [rank.communicate(timeout=TIMEOUT) for rank in ranks]
    return _first(*outputs[0]) - begin


def _first(stdout: str, stderr: str) -> float:
    found = re.search(r"FIRST (\S+)", stdout)
    if found is None:
        raise LaunchError(f"no collective took place:\n{stdout}{stderr}")
    return float(found.group(1))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

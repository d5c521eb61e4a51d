"""What the tests of OneFlow's starts and ends share: ranks of a script that are started one by one.

PYTEST_DONT_REWRITE: the tests import it before pytest takes its fixtures.
"""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from project import free_port
from unidist.launch.environments import interpreter_for

PATIENCE = 120.0  # seconds for anything here: a hang is a failure

TRAIN = """
import sys
import unidist
options = {options}
with unidist.Strategy("oneflow", timeout={timeout}, **options) as strategy:
    for step in range({steps}):
        strategy.all_reduce(step, "sum")
        if step == 3 and strategy.rank == strategy.world_size - 1:
            {last}
    strategy.print("ranks", strategy.all_gather(strategy.rank))
"""


class Ranks:
    """Processes of a script, started one by one, and ended with the test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[subprocess.Popen[str]] = []
        self.python, self._env = interpreter_for("oneflow")

    def script(self, name="train.py", *, timeout=60, steps=4, last="pass", comment="", **options) -> Path:
        path = self._folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(TRAIN.format(options=options, timeout=timeout, steps=steps, last=last) + comment)
        return path

    def start(self, script: Path, prefix=(), **variables) -> subprocess.Popen[str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith("UNIDIST_")}
        env |= {**self._env, "OMP_NUM_THREADS": "1", "UNIDIST_SECRET": "of these tests", "UNIDIST_BACKEND": "oneflow"}
        env |= {name: str(value) for name, value in variables.items()}
        process = subprocess.Popen(
            [self.python, *prefix, str(script)],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def start_all(self, *scripts: Path, port: int) -> list[subprocess.Popen[str]]:
        """As any launcher that sets RANK and WORLD_SIZE does."""
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": len(scripts)}
        return [self.start(script, RANK=rank, LOCAL_RANK=rank, **place) for rank, script in enumerate(scripts)]

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


@pytest.fixture
def ranks(tmp_path):
    made = Ranks(tmp_path)
    yield made
    made.close()


@pytest.fixture
def port():
    return free_port()


def outcome(*processes: subprocess.Popen[str]) -> list[tuple[int, str]]:
    outputs = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]

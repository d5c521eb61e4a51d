"""The steps of a build: each a process of its own, with progress on the screen and everything it says in a log."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from unidist.errors import SetupError
from unidist.launch.plan import inherited
from unidist.launch.processes import EndWithParent
from unidist.setup import store
from unidist.setup.locks import normal
from unidist.setup.progress import Progress
from unidist.setup.store import Environment

FOREIGN = {"PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_USER"}  # pip must look at its own place only


class StepFailed(SetupError):
    """A step ended badly; `said` is the end of what it printed."""

    def __init__(self, message: str, said: str) -> None:
        super().__init__(message)
        self.said = said


class Steps:
    """Runs the steps of a build: progress on the screen, everything in the log, the last lines when one fails."""

    def __init__(self, progress: Progress, path: Path) -> None:
        self._progress = progress
        self.path, self.say = path, progress.say

    def run(
        self, label: str, command: Sequence[str], env: Mapping[str, str] | None = None, timeout: float | None = None
    ) -> None:
        self._progress.begin(label)
        begun = time.monotonic()
        with open(self.path, "ab") as log:
            log.write(f"\n## {label}\n$ {' '.join(command)}\n".encode())
            log.flush()
            start = log.tell()
            child = subprocess.Popen(
                command,
                env={**clean(), **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=EndWithParent(),
            )
            try:
                while child.poll() is None:
                    self._progress.tick(self._last(start, 1))
                    if timeout is not None and time.monotonic() - begun > timeout:
                        raise SetupError(self._explain(label, f"took longer than {timeout:g} s", start))
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.wait(0.15)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)  # also what it started
                child.wait()
        if child.returncode != 0:
            said = self._last(start, 200)
            raise StepFailed(self._explain(label, f"failed (exit code {child.returncode})", start), said)
        self._progress.done()

    def _last(self, start: int, count: int) -> str:
        with open(self.path, "rb") as log:
            log.seek(max(start, os.path.getsize(self.path) - 16384))
            lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        return "\n".join(lines[-count:])

    def _explain(self, label: str, what: str, start: int) -> str:
        last = "".join(f"\n    {line}" for line in self._last(start, 15).splitlines())
        return f"{label}: {what}. Its last lines:{last}\n  The whole log: {self.path}"


def pip(environment: Environment, *arguments: str, verb: str = "install") -> list[str]:
    return [str(environment.python), "-m", "pip", verb, "--no-input", "--disable-pip-version-check", *arguments]


def constraints(environment: Environment, but: Collection[str] = (), lock: Mapping[str, str] | None = None) -> str:
    """A pip constraints file that keeps every package, but those named, at the version it has, and all others at that
    of the lock."""
    file = environment.path / "unidist-constraints.txt"
    free = {"pip", "setuptools", "wheel", *but}
    here = {name: version for name, version in versions(environment).items() if name not in free}
    there = {normal(name) for name in (*here, *free)}
    wanted = {**here, **{name: version for name, version in (lock or {}).items() if name not in there}}
    file.write_text("".join(f"{name}=={version}\n" for name, version in wanted.items()))
    return str(file)


def versions(environment: Environment) -> dict[str, str]:
    ask = "import importlib.metadata as m; [print(d.metadata['Name'], d.version) for d in m.distributions()]"
    answer = subprocess.run([str(environment.python), "-I", "-c", ask], capture_output=True, text=True, check=True)
    return dict(line.split(" ", 1) for line in answer.stdout.splitlines() if line.strip())


def log_of(environment: Environment) -> Path:
    directory = store.home() / "logs"
    directory.mkdir(parents=True, exist_ok=True)
    return directory / f"{environment.path.name}-{time.strftime('%Y%m%d-%H%M%S')}.log"


def clean() -> dict[str, str]:
    return {name: value for name, value in inherited().items() if name not in FOREIGN}

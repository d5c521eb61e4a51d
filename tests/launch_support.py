"""What the launcher's tests share: a third-party backend that needs no framework, and a way to run `unidist` on it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUN = ("run", "--backend", "plain")
ROLES = ("run", "--backend", "roles", "-n", "2", "--servers", "2")
STAY = "child(); child(start_new_session=True); "  # in a script: a grandchild in the process group, one that left it
PATIENCE = 120.0  # a hard limit for anything that should end by itself; no test asserts how long it took

# Registered by an entry point, like any backend of a third party. "roles" has a scheduler and servers too.
PLUGIN = """
from dataclasses import dataclass
from unidist.backend import Capabilities, Plugin
from unidist.errors import UsageError
from unidist.launch.plan import Process

@dataclass(frozen=True)
class Options:
    mode: str = "sync"
    depth: int = 1
    def __post_init__(self):
        if self.depth < 1:
            raise UsageError(f"depth is {self.depth}, it must be at least 1")

def roles(job):
    env = {"ROOT_PORT": str(job.ports[0])}
    def process(role, rank, port, **more):
        return Process(role, rank, job.command, {**env, "ROLE": role, "PORT": str(port)}, job.host, **more)
    yield process("scheduler", 0, job.ports[0], numbered=False)
    for rank in range(job.nproc):
        yield process("worker", rank, job.ports[1 + rank])
    for rank in range(job.servers):
        yield process("server", rank, job.ports[1 + job.nproc + rank])

plain = Plugin("plain", "fake_backends:Backend", Options, requires=(), interface_variables=("PLAIN_INTERFACE",))
roles = Plugin("roles", "fake_backends:Backend", Options, requires=(), plan=roles,
               capabilities=Capabilities(gpu="it is only a test"))
absent = Plugin("absent", "fake_backends:Backend", Options, requires=("no_such_framework",))
"""


@dataclass
class Ended:
    code: int
    out: str
    err: str

    @property
    def summary(self) -> list[str]:
        """unidist's own lines, from the first cause on."""
        lines = self.err.splitlines()
        opening = re.compile(r"unidist: \w+ on \d+ workers?")
        starts = [i for i, line in enumerate(lines) if line.startswith("unidist: ") and not opening.match(line)]
        return lines[starts[0] :] if starts else []


class Place:
    """A directory with the backends above, scripts, and pid files of what they start."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.python = sys.executable
        plugins = path / "plugins"
        info = plugins / "fake_backends-1.0.dist-info"
        info.mkdir(parents=True)
        (plugins / "fake_backends.py").write_text(PLUGIN)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-backends\nVersion: 1.0\n")
        names = "".join(f"{name} = fake_backends:{name}\n" for name in ("plain", "roles", "absent"))
        (info / "entry_points.txt").write_text(f"[unidist.backends]\n{names}")
        (path / "pids").mkdir()
        self.env = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("UNIDIST_", "OMP_"))},
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(plugins)]),
            "UNIDIST_HOME": str(path / "home"),
            "PIDS": str(path / "pids"),
        }

    def script(self, body: str, name: str = "script.py") -> str:
        """A script that first leaves its process id. It has os, sys, time, rank, role and `child()`."""
        head = """\
            import os, signal, subprocess, sys, time
            rank, role = int(os.environ["UNIDIST_RANK"]), os.environ["UNIDIST_ROLE"]
            def leave(pid):
                open(os.path.join(os.environ["PIDS"], str(pid)), "w").close()
            def child(code="import time; time.sleep(600)", **how):
                process = subprocess.Popen([sys.executable, "-c", code], **how)
                leave(process.pid)
                return process
            def wait_for(count):
                while len(os.listdir(os.environ["PIDS"])) < count:
                    time.sleep(0.01)
            leave(os.getpid())
        """
        file = self.path / name
        file.write_text(textwrap.dedent(head) + textwrap.dedent(body))
        return str(file)

    def command(self, *arguments: str) -> list[str]:
        return [self.python, "-m", "unidist", *arguments]

    def run(self, *arguments: str, **env: str) -> Ended:
        process = self.start(*arguments, **env)
        return self.end(process)

    def start(self, *arguments: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*arguments),
            env={**self.env, **env},
            cwd=self.path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def end(self, process: subprocess.Popen[str]) -> Ended:
        try:
            out, err = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=PATIENCE)
            raise AssertionError(f"it did not end by itself\n{out}\n{err}") from None
        return Ended(process.returncode, out, err)

    def pids(self) -> list[int]:
        return [int(name) for name in os.listdir(self.path / "pids")]

    def wait_for_pids(self, count: int) -> list[int]:
        until = time.monotonic() + PATIENCE
        while len(self.pids()) < count:
            assert time.monotonic() < until, f"{count} processes expected, {len(self.pids())} came"
            time.sleep(0.02)
        return self.pids()

    def all_gone(self) -> None:
        """Every process that left its id has ended; those that have not are ended here, and named."""
        until = time.monotonic() + PATIENCE
        while left := [pid for pid in self.pids() if alive(pid)]:
            if time.monotonic() > until:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                raise AssertionError(f"still running: {left}")
            time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"

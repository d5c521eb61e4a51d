"""Starts that cannot work, the same for every engine: what each rank is given, and what it has to be told.

    for case in CASES: check(case, "torch", folder)        in a test of a backend
    python tests/bad_starts.py --write docs/failures.md    runs all of them on all engines, and writes the page
    python tests/bad_starts.py torch                       prints the page of one engine

Every rank ends by itself within the timeout and a few seconds, with one error that has one message and
that the script may catch. There is no native stack.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from project import ROOT, free_port

TIMEOUT = 10.0  # seconds that Strategy is given
MORE = 5.0  # seconds that it may take on top of them
PATIENCE = 240.0  # for a machine that is busy
ENGINES = ("torch", "mxnet", "oneflow", "horovod")
NATIVE = re.compile("Traceback|Stack trace|Check failed|terminate called|Segmentation fault")

SCRIPT = """
import os, sys, time
import unidist
began = time.monotonic()
try:
    with unidist.Strategy({backend!r}, timeout={timeout}) as strategy:
        print(f"{{time.monotonic() - began:.1f}} started as rank", strategy.rank)
except unidist.UnidistError as error:
    print(f"{{time.monotonic() - began:.1f}} {{type(error).__name__}}: {{error}}", flush=True)
    os._exit(3)
"""


@dataclass
class Start:
    """Ranks that were started by hand on this host. With rank 0 come MXNet's scheduler, which hosts the meeting in its
    place, and one server."""

    backend: str
    folder: Path
    timeout: float = TIMEOUT  # of the Strategy
    ranks: list[subprocess.Popen[str]] = field(default_factory=list)
    services: list[subprocess.Popen[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        from unidist.launch.environments import interpreter_for

        self._python, self._variables = interpreter_for(self.backend)

    def rank(
        self, rank: int, size: int, port: int, addr: str = "127.0.0.1", first_line: str = "", clone: Path = ROOT
    ) -> None:
        """`first_line` goes into the script of this process only; `clone` is the unidist that it finds."""
        path = self.folder / f"process-{len(self.ranks)}" / "train.py"
        path.parent.mkdir()
        path.write_text(first_line + SCRIPT.format(backend=self.backend, timeout=self.timeout))
        if self.backend != "mxnet":
            place = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": addr, "MASTER_PORT": str(port)}
            self.ranks.append(self._start(path, place, clone))
            return
        place = {"DMLC_NUM_WORKER": str(size), "DMLC_NUM_SERVER": "1", "DMLC_PS_ROOT_PORT": str(port)}
        place["DMLC_PS_ROOT_URI"] = addr
        if rank == 0:
            for role in ("scheduler", "server"):
                self.services.append(self._start(path, {**place, "DMLC_ROLE": role}, clone))
        self.ranks.append(self._start(path, {**place, "DMLC_ROLE": "worker", "DMLC_WORKER_ID": str(rank)}, clone))

    def _start(self, script: Path, place: dict[str, str], clone: Path) -> subprocess.Popen[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("UNIDIST_", "DMLC_"))}
        paths = os.pathsep.join(map(str, (clone, clone / "backends")))
        return subprocess.Popen(
            [self._python, str(script)],
            env={**clean, **self._variables, **place, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def outcomes(self, code: int) -> list[str]:
        """What each rank, and then each service, says: seconds, the error's name, its message."""
        said = []
        for process in (*self.ranks, *self.services):
            out, err = process.communicate(timeout=PATIENCE)
            assert process.returncode == code, out + err
            assert not NATIVE.search(err), err
            said.append(out)
        return said


@contextlib.contextmanager
def foreign_program(words: bytes | None) -> Iterator[int]:
    """Holds a port. It says these words to everyone, or with None accepts and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        kept: list[socket.socket] = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    wire, _ = server.accept()
                    kept.append(wire)
                    if words is not None:
                        wire.sendall(words)
                        wire.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for wire in kept:
                wire.close()


def rank_missing(start: Start) -> Mapping[int, str]:
    """Ranks 0 and 2 of 3 are started, rank 1 is not."""
    port = free_port()
    start.rank(0, 3, port)
    start.rank(2, 3, port)
    return dict.fromkeys((0, 1), r"RanksMissing: rank 1 (of 3 )?did not come .*ranks 0, 2")


def rank_0_missing(start: Start) -> Mapping[int, str]:
    """Rank 1 of 2 is started, rank 0 is not."""
    start.rank(1, 2, free_port())
    return {0: r"CommunicationError: rank 1 .* nobody listens there"}


def two_of_one_rank(start: Start) -> Mapping[int, str]:
    """Of 3 processes, two are told that they are rank 1."""
    port = free_port()
    for rank in (0, 1, 1):
        start.rank(rank, 3, port)
    return dict.fromkeys(range(3), r"RanksDisagree: two processes say they are rank 1")


def sizes_differ(start: Start) -> Mapping[int, str]:
    """Rank 0 is told that there are 2 ranks, rank 1 that there are 3."""
    port = free_port()
    start.rank(0, 2, port)
    start.rank(1, 3, port)
    return dict.fromkeys(range(2), r"RanksDisagree: .*the number of processes differs: 2 .*3 .*on rank 1")


def scripts_differ(start: Start) -> Mapping[int, str]:
    """The script on rank 1 has one more line."""
    port = free_port()
    start.rank(0, 2, port)
    start.rank(1, 2, port, first_line="# changed\n")
    return dict.fromkeys(range(2), r"RanksDisagree: .*the script differs: train.py .* on rank 0.*train.py .* on rank 1")


def versions_differ(start: Start) -> Mapping[int, str]:
    """Rank 1 runs another version of unidist."""
    other = start.folder / "other"
    for each in ("unidist", "backends"):
        shutil.copytree(ROOT / each, other / each)
    shutil.copy(ROOT / "pyproject.toml", other)
    (other / "unidist" / "_version.py").write_text('__version__ = "0.0.1"\n')
    port = free_port()
    start.rank(0, 2, port)
    start.rank(1, 2, port, clone=other)
    only = r"RanksDisagree: .* alike: the version of unidist differs: .*0\.0\.1 on rank 1 (?!.* differs)"
    return dict.fromkeys(range(2), only)


def port_taken(start: Start, words: bytes | None = None) -> Mapping[int, str]:
    """Another program has the port, accepts every connection and says nothing."""
    with foreign_program(words) as port:
        start.rank(0, 2, port)
        start.rank(1, 2, port)
        for process in (*start.ranks, *start.services):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)
    tells = f"CommunicationError: .*{'says nothing' if words is None else 'another program'}"
    host = r"WorldError: (rank 0 cannot listen|the scheduler cannot have port) .* has it"
    return {0: tells, 1: tells, 2: host} if start.services else {0: host, 1: tells}


def port_taken_by_a_talker(start: Start) -> Mapping[int, str]:
    """Another program has the port, and answers every connection in its own language."""
    return port_taken(start, b"HTTP/1.1 400 Bad Request\r\n\r\n")


def name_does_not_resolve(start: Start) -> Mapping[int, str]:
    """The master's address is a name that no host knows."""
    port = free_port()
    for rank in (0, 1):
        start.rank(rank, 2, port, addr="no-such-host.invalid")
    cannot = r"WorldError: .*no-such-host.invalid.* cannot resolve"
    return {0: cannot if start.services else r"RanksMissing: rank 1 .*no-such-host", 1: cannot}


def master_as_localhost(start: Start) -> Mapping[int, str]:
    """Rank 0 is told that the master is `localhost`, as Kubeflow's operator does. The others are told its address and
    find it there, so the job starts."""
    from unidist.network import outward_address

    start.timeout = PATIENCE  # this one is to start, and on a busy machine that takes longer
    port = free_port()
    start.rank(0, 2, port, addr="localhost")
    start.rank(1, 2, port, addr=outward_address())
    return {rank: f"started as rank {rank}" for rank in range(2)}


def address_unreachable(start: Start) -> Mapping[int, str]:
    """The master's address is one that no message reaches."""
    start.rank(1, 2, 9, addr="224.0.0.1")  # of a group, which nothing connects to
    return {0: r"CommunicationError: rank 1 .*(no answer comes back|no way leads|nobody listens)"}


Case = Callable[[Start], Mapping[int, str]]
CASES: tuple[Case, ...] = (
    rank_missing,
    rank_0_missing,
    two_of_one_rank,
    sizes_differ,
    scripts_differ,
    versions_differ,
    port_taken,
    port_taken_by_a_talker,
    master_as_localhost,
    name_does_not_resolve,
    address_unreachable,
)


def check(case: Case, backend: str, folder: Path) -> tuple[list[str], list[str]]:
    """Run it. Returns what the ranks said, which is what the case expects, and what the services said."""
    start = Start(backend, folder)
    try:
        expected = case(start)
        said = start.outcomes(0 if case is master_as_localhost else 3)
        for number, pattern in expected.items():
            assert re.search(pattern, said[number]), f"{case.__name__}: {said[number]}"
        return said[: len(start.ranks)], said[len(start.ranks) :]
    finally:
        for process in (*start.ranks, *start.services):
            process.kill()
            process.communicate()


# -- the page --------------------------------------------------------------------------------------------------------

PAGE = """# When a job starts badly

Before an engine starts, all ranks meet and compare what they were told. This page shows how a start by hand most often
goes wrong, and what each rank says then. Every rank gets one error with one message, within the timeout plus {more:g}
seconds. A script may catch it; else Python shows it as any other, with a traceback. There is no native stack trace.

The page was written by

    python tests/bad_starts.py --write docs/failures.md

which starts real processes of each engine on one machine and takes about seven minutes. In the messages `PORT`, `HOST`,
`HASH`, `PID`, `COMMAND` and `N` stand for what is different each time. A message that several engines have in common is
shown once. On MXNet the scheduler hosts the meeting in place of rank 0; what the scheduler and the server say is left
out.

Seconds until the last process has said what is wrong, with `timeout={timeout:g}` ({machine}):

{table}

## What the ranks say
{messages}"""


def main() -> int:
    """1 when one took longer than it may; a machine that is busy with something else is not the place to measure."""
    from unidist.bench.compare import machine

    parser = argparse.ArgumentParser(description="Run every bad start on every engine; print docs/failures.md.")
    parser.add_argument("backends", nargs="*", metavar="backend", help="run these engines only")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page to FILE instead")
    asked = parser.parse_args()
    backends = asked.backends or ENGINES
    table = [f"| | {' | '.join(backends)} |", f"| --- {'| --- ' * len(backends)}|"]
    messages, late = "", False
    for case in CASES:
        name, works = case.__name__.replace("_", " "), case is master_as_localhost
        cells: list[str] = []
        found: dict[str, list[str]] = {}
        for backend in backends:
            with tempfile.TemporaryDirectory() as folder:
                ranks, services = check(case, backend, Path(folder))
            took = max(float(last_line(each).split()[0]) for each in (*ranks, *services) if each)
            late |= not works and took > TIMEOUT + MORE
            cells.append("it starts" if works else f"{took:.1f}")
            print(f"{name}, {backend}: {cells[-1]}", file=sys.stderr)
            for text in dict.fromkeys(map(general, ranks)):
                found.setdefault(text, []).append(backend)
        table.append(f"| {name} | {' | '.join(cells)} |")
        messages += f"\n**{name}**\n\n{' '.join(str(case.__doc__).split())}\n\n"
        messages += "".join(f"- {', '.join(engines)}: `{text}`\n" for text, engines in found.items())
    page = PAGE.format(more=MORE, timeout=TIMEOUT, machine=machine(), table="\n".join(table), messages=messages)
    if late or asked.write is None:
        print(page, end="")
    else:
        asked.write.write_text(page, encoding="utf-8")
    if late:
        print(f"one took longer than {TIMEOUT + MORE:g} s; nothing was written to a file", file=sys.stderr)
    return int(late)


def last_line(said: str) -> str:
    return said.strip().splitlines()[-1]


def general(said: str) -> str:
    """The message without its seconds, and with words for what is different each time."""
    text = last_line(said).split(maxsplit=1)[1]
    text = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "HOST", text)
    text = re.sub(r"ports \d+ to \d+", "ports PORT to PORT + 7", text)
    text = re.sub(r"(?<=:)\d{4,5}\b|(?<=port )\d{4,5}\b", "PORT", text)
    text = re.sub(r"process \d+ has it \(.*?\)", "process PID has it (COMMAND)", text)
    text = re.sub(r"sha256 \w+", "sha256 HASH", text)
    return re.sub(r"(started as rank) \d+", r"\1 N", text)


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "backends")]
    sys.exit(main())

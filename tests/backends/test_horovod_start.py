"""How Horovod starts and ends: starts that cannot be, lost ranks, several lives."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import pytest

from project import ROOT, free_port
from unidist.launch.environments import interpreter_for

PATIENCE = 300.0
NATIVE = re.compile(r"terminate called|Aborted|Segmentation|/gloo/|operations\.cc|frame #")


# -- starts that cannot be ---------------------------------------------------------------------------------------------

TIMEOUT = 6
OPENS = (
    f"import sys, unidist\nunidist.Strategy('horovod', timeout={TIMEOUT}, cycle_time_ms=float((sys.argv + ['1'])[1]))\n"
)


def start(script: Path, rank: int, size: int, place: str, *arguments: str, **env: str) -> subprocess.Popen[str]:
    """One rank, by Horovod's variables and no launcher."""
    python, own = interpreter_for("horovod")
    address, _, port = place.rpartition(":")
    said: dict[str, object] = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
    said |= {"CROSS_RANK": 0, "CROSS_SIZE": 1, "GLOO_RENDEZVOUS_ADDR": address, "GLOO_RENDEZVOUS_PORT": port}
    variables = {f"HOROVOD_{name}": str(value) for name, value in said.items()}
    path = os.pathsep.join([str(ROOT), str(ROOT / "backends")])
    return subprocess.Popen(
        [python, str(script), *arguments],
        env={**os.environ, **own, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **variables, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(*processes: subprocess.Popen[str]) -> list[str]:
    """What each has said, after it has failed by itself."""
    said = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    assert all(process.returncode == 1 for process in processes), [each.returncode for each in processes]
    assert not any(NATIVE.search(each) for each in said), said
    return said


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(OPENS)
    return tmp_path / "script.py"


@pytest.fixture
def place() -> str:
    return f"127.0.0.1:{free_port()}"


def test_a_rank_is_missing(script: Path, place: str) -> None:
    for said in ended(*(start(script, rank, 3, place) for rank in (0, 2))):
        assert re.search(r"RanksMissing: rank 1 of 3 did not come .* ranks 0, 2", said), said


def test_rank_0_is_missing(script: Path, place: str) -> None:
    (said,) = ended(start(script, 1, 2, place))
    assert f"could not meet the others at {place} within {TIMEOUT} s: nobody listens there" in said


def test_two_of_one_rank(script: Path, place: str) -> None:
    for said in ended(*(start(script, rank, 3, place) for rank in (0, 1, 1))):
        assert "RanksDisagree: two processes say they are rank 1" in said, said


def test_sizes_differ(script: Path, place: str) -> None:
    for said in ended(start(script, 0, 2, place), start(script, 1, 3, place)):
        assert "the number of processes differs: 2 on rank 0" in said, said


def test_scripts_differ(script: Path, place: str) -> None:
    other = script.with_name("other.py")
    other.write_text(OPENS + "\n")
    for said in ended(start(script, 0, 2, place), start(other, 1, 2, place)):
        assert "the script differs: script.py" in said, said


def test_options_differ(script: Path, place: str) -> None:
    for said in ended(start(script, 0, 2, place, "1"), start(script, 1, 2, place, "2")):
        assert "the options differs: cycle_time_ms=1.0 on rank 0" in said, said


def test_an_address_that_nobody_can_resolve(script: Path) -> None:
    (said,) = ended(start(script, 1, 2, "nowhere.invalid:29500"))
    assert "the master's address is 'nowhere.invalid'" in said, said


@pytest.mark.parametrize(
    ("words", "tells"), [(None, "accepts connections and says nothing"), (b"SSH-2.0-x\r\n", "another program has")]
)
def test_a_foreign_program_has_the_port(script: Path, words: bytes | None, tells: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        kept = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    kept.append(server.accept()[0])
                    if words is not None:
                        kept[-1].sendall(words)

        threading.Thread(target=serve, daemon=True).start()
        place = f"127.0.0.1:{server.getsockname()[1]}"
        first, second = ended(*(start(script, rank, 2, place) for rank in (0, 1)))
        server.shutdown(socket.SHUT_RDWR)
        for wire in kept:
            wire.close()
    assert f"rank 0 cannot listen at {place}" in first, first
    assert f"process {os.getpid()} has it" in first, first
    assert tells in second, second


def test_a_web_server_has_the_port(script: Path, tmp_path: Path) -> None:
    """It answers as horovodrun's server does, but keeps nothing."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Quiet) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"127.0.0.1:{server.server_address[1]}"
        first, second = ended(*(start(script, rank, 2, place) for rank in (0, 1)))
        server.shutdown()
    assert f"rank 0 cannot tell the others where it is at http://{place}" in first, first
    assert "it answers 501" in first, first
    assert f"waited {TIMEOUT} s for http://{place}/unidist/meeting, which rank 0 writes" in second, second


# -- lost ranks --------------------------------------------------------------------------------------------------------


ENDS = {
    "is killed": ("os.kill(os.getpid(), 9)", "it was killed, crashed or left by os._exit", -signal.SIGKILL),
    "leaves by os._exit": ("os._exit(0)", "it was killed, crashed or left by os._exit", 0),
    "leaves by sys.exit": ("sys.exit(0)", "sys.exit(0) has left its Strategy before the others were done", 0),
    "raises": ("raise ValueError('its own')", "ValueError: its own", 1),
}
LOOP = """
import os, sys, unidist
with unidist.Strategy("horovod", timeout=120) as strategy:
    for number in range(10**9):
        strategy.all_reduce(number, "sum")
        if strategy.rank == 1 and number == 20:
            {}
"""


def first_word(said: str) -> str:
    """The first line about the failure."""
    lines = [line for line in said.splitlines() if "no secret is set" not in line and " processes on " not in line]
    return next((line for line in lines if not re.search(r"rank \d+ (waits|is not) at", line)), "")


@pytest.mark.parametrize("how", ENDS)
def test_survivors_name_the_rank_that(how: str, script: Path, place: str) -> None:
    does, told, code = ENDS[how]
    script.write_text(LOOP.format(does))
    victim, *others = (start(script, rank, 3, place) for rank in (1, 0, 2))
    for rank, said in zip((0, 2), ended(*others), strict=True):
        line = first_word(said)
        assert re.fullmatch(rf"unidist: PeerFailed: rank 1 on \S+: .*; rank {rank} on \S+ ends with it", line), said
        assert told in line
    victim.communicate(timeout=PATIENCE)
    assert victim.returncode == code


def test_a_killed_rank_is_named_under_horovodrun(script: Path) -> None:
    script.write_text(LOOP.format("os.kill(os.getpid(), 9)"))
    python, own = interpreter_for("horovod")
    launch = [python, "-m", "horovod.runner.launch", "--gloo", "-np", "2", python]
    path = os.pathsep.join([str(ROOT), str(ROOT / "backends")])
    env = {**os.environ, **own, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    job = subprocess.run([*launch, str(script)], env=env, capture_output=True, text=True, timeout=PATIENCE)
    assert job.returncode != 0
    assert not NATIVE.search(job.stderr), job.stderr
    named = re.search(r"unidist: PeerFailed: rank 1 on \S+: .* killed.*; rank 0 on \S+ ends with it", job.stderr)
    assert named, job.stderr


# -- several lives -----------------------------------------------------------------------------------------------------


def test_strategies_one_after_the_other(script: Path, tmp_path: Path) -> None:
    script.write_text(
        "import unidist\n"
        "for life in range(8):\n"
        "    with unidist.Strategy('horovod') as strategy:\n"
        "        assert strategy.all_reduce(strategy.rank + life, 'sum') == 3 * life + 3\n"
        "print('all lived')\n"
    )
    command = [sys.executable, "-m", "unidist", "run", "--backend=horovod", "--nproc=3", str(script)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    job = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE)
    assert job.stdout.count("all lived") == 3, job

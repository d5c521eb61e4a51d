"""How Horovod starts and ends: a store closed to strangers, starts that cannot be, lost ranks, several lives."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import pytest

from project import ROOT, free_port
from unidist.control import Control, ControlServer
from unidist.control.peers import Peers
from unidist.errors import UsageError, WorldError
from unidist.launch.environments import interpreter_for
from unidist_horovod import meeting, store
from unidist_horovod.store import Store

PATIENCE = 300.0
NATIVE = re.compile(r"terminate called|Aborted|Segmentation|/gloo/|operations\.cc|frame #")


# -- the store -------------------------------------------------------------------------------------------------------


def peers(control: Control, rank: int = 0, addresses: tuple[str, ...] = ("127.0.0.1", "127.0.0.1")) -> Peers:
    hosts = tuple(f"h{n}" for n in range(len(addresses)))
    return Peers(
        control, rank, len(addresses), hosts, addresses, addresses[rank], "lo", "strategy 1", launched=False, host=None
    )


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Store]]:
    """Of two ranks."""
    monkeypatch.setattr(store, "WAIT", 0.05)
    with ControlServer() as server, contextlib.ExitStack() as stack:
        controls = [Control(server.url, server.token) for _ in range(2)]
        for control in controls:
            stack.callback(control.close)
        yield [stack.enter_context(Store(peers(control, rank))) for rank, control in enumerate(controls)]


def asked(one: Store, method: str, key: str, body: bytes = b"", secret: str | None = None) -> tuple[int, bytes]:
    """As Horovod's client does: http:// in front of the address, and the port behind it."""
    told = one.variables
    address, port = told["HOROVOD_GLOO_RENDEZVOUS_ADDR"], told["HOROVOD_GLOO_RENDEZVOUS_PORT"]
    place, _, path = f"{address}:{port}/{key}".partition("/")
    if secret is not None:
        path = path.replace(one.secret, secret)
    connection = http.client.HTTPConnection(place, timeout=60)
    try:
        connection.request(method, f"/{path}", body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_what_one_rank_writes_the_other_reads(stores: list[Store]) -> None:
    assert asked(stores[1], "GET", "global_/0") == (404, b"")
    assert asked(stores[0], "PUT", "global_/0", b"\0 anything") == (200, b"")
    assert asked(stores[1], "GET", "global_/0") == (200, b"\0 anything")
    assert asked(stores[0], "DELETE", "global_/0") == (200, b"")
    assert asked(stores[1], "GET", "global_/0")[0] == 200  # the others may still be reading


@pytest.mark.parametrize("secret", ["", "x", "0" * 32])
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_strangers_neither_read_nor_write(stores: list[Store], method: str, secret: str) -> None:
    asked(stores[0], "PUT", "global_/0", b"ours")
    assert asked(stores[0], method, "global_/0", b"theirs", secret=secret) == (403, b"")
    assert asked(stores[1], "GET", "global_/0") == (200, b"ours")


def test_what_is_kept_is_bounded(stores: list[Store]) -> None:
    much = http.client.HTTPConnection("127.0.0.1", stores[0].server_address[1], timeout=60)
    much.putrequest("PUT", f"/{stores[0].secret}:{stores[0].server_address[1]}/global_/0")
    much.putheader("Content-Length", str(store.MOST_BYTES + 1))
    much.endheaders()
    assert much.getresponse().status == 413  # without waiting for it
    much.close()
    answers = {asked(stores[0], "PUT", f"global_/{n}", b"x")[0] for n in range(store.MOST_VALUES)}
    assert answers == {200}
    assert asked(stores[0], "PUT", "global_/more", b"x")[0] == 413


def test_silent_strangers_hold_up_nobody(stores: list[Store]) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(10 * store.STRANGERS):
            stack.enter_context(socket.create_connection(("127.0.0.1", stores[0].server_address[1])))
        assert asked(stores[0], "PUT", "global_/0", b"ours")[0] == 200
        assert asked(stores[0], "GET", "global_/0") == (200, b"ours")
        handlers = [each for each in threading.enumerate() if "process_request_thread" in each.name]
        assert len(handlers) <= 2 * store.STRANGERS


@pytest.mark.parametrize(
    "words",
    [
        b"",
        b"\0" * 1000,
        b"GET /\xff HTTP/1.1\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"PUT / HTTP/1.1\r\n",
        b"x" * 100_000,
    ],
)
def test_nonsense_ends_its_own_connection_only(stores: list[Store], words: bytes) -> None:
    with socket.create_connection(("127.0.0.1", stores[0].server_address[1])) as stranger, contextlib.suppress(OSError):
        stranger.sendall(words)
        stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(1000):
            pass
    assert asked(stores[0], "PUT", "global_/0", b"ours")[0] == 200


# -- what Horovod is told ----------------------------------------------------------------------------------------------


def test_places_of_unequal_nodes() -> None:
    """Two, one and three ranks: numbers within a node, and over the nodes among those with the same number."""
    addresses = ("a", "b", "a", "c", "c", "c")
    told = [meeting._place(peers(Control("tcp://h:1", "x"), rank, addresses)) for rank in range(len(addresses))]
    names = ("HOSTNAME", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    assert [" ".join(each[f"HOROVOD_{name}"] for name in names) for each in told] == [
        "node-0 0 2 0 3",
        "node-1 0 1 1 3",
        "node-0 1 2 0 2",
        "node-2 0 3 2 3",
        "node-2 1 3 1 2",
        "node-2 2 3 0 1",
    ]


def test_a_host_whose_name_horovod_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    with pytest.raises(WorldError, match=r"stands for no address.*`10\.0\.0\.1 no-such-host\.invalid` to /etc/hosts"):
        meeting._require_name("10.0.0.1")
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    with pytest.raises(WorldError, match=r"stands for 127\.0\.0\.1 here.*give it 10\.0\.0\.1"):
        meeting._require_name("10.0.0.1")
    meeting._require_name("127.0.0.1")


def test_an_interface_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    one = peers(Control("tcp://h:1", "x"))
    assert meeting._interface(one) == "lo"
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "nothing0")
    with pytest.raises(UsageError, match=r"HOROVOD_GLOO_IFACE is 'nothing0'.*only .*lo"):
        meeting._interface(one)


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

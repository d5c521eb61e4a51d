"""The meeting: ranks come together and agree, or each hears who is missing or different. No framework is needed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bad_starts import foreign_program
from project import ROOT, free_port
from unidist.control import places
from unidist.control.meeting import Meeting
from unidist.errors import RanksMissing, StaleRendezvous, UnidistError, UsageError, WorldError
from unidist.network import identity, outward_address
from unidist.world import World, detect

PATIENCE = 120.0


def start(init: str, rank: int, size: int, *same: str, timeout: float = 60, **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "tests" / "meeting_rank.py"), init, str(rank), str(size), str(timeout), *same]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **env},
    )


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=PATIENCE)
    assert out, err
    answer: dict[str, Any] = json.loads(out)
    return answer | {"said": err}


@pytest.fixture
def init() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


# -- all is well -------------------------------------------------------------------------------------------------------


def test_all_meet_in_any_order(init: str) -> None:
    answers = [result(process) for process in [start(init, rank, 3, "the script=a") for rank in (2, 0, 1)]]
    assert sorted(answer["rank"] for answer in answers) == [0, 1, 2]
    for answer in answers:
        assert answer["told"] == [{"rank": rank} for rank in range(3)]
        assert answer["local_rank"] == answer["rank"]
        assert (answer["local_world_size"], answer["num_nodes"], answer["node_rank"]) == (3, 1, 0)
        assert answer["interface"] == "lo"


def test_one_after_the_other_in_the_same_processes(init: str) -> None:
    """The n-th meeting of a process is with the n-th of the others, however fast one of them comes back."""
    answers = [result(process) for process in [start(init, rank, 2, "times=12") for rank in (0, 1)]]
    assert [answer.get("rank") for answer in answers] == [0, 1], answers


def test_who_can_connect_is_said_once_on_rank_0(init: str, tmp_path: Path) -> None:
    said = [result(process)["said"] for process in [start(init, rank, 2) for rank in (0, 1)]]
    assert said[0].count("any user of this machine can connect") == 1
    assert "UNIDIST_SECRET" in said[0]
    assert said[1] == ""
    (tmp_path / "secret").write_text("between us\n")
    (tmp_path / "secret").chmod(0o600)
    for env in ({"UNIDIST_SECRET": "between us"}, {"UNIDIST_SECRET_FILE": str(tmp_path / "secret")}):
        answers = [result(process) for process in [start(init, rank, 2, **env) for rank in (0, 1)]]
        assert [answer["said"] for answer in answers] == ["", ""]
        assert answers[1]["rank"] == 1


@pytest.mark.parametrize("answer", [None, b"HTTP/1.1 400 Bad Request\r\n\r\n"], ids=["silent", "talkative"])
def test_a_stranger_behind_a_taken_port_is_passed_by(answer: bytes | None) -> None:
    """torchrun has the master's port, and who listens behind it is not rank 0, but the next one is."""
    with foreign_program(answer) as port:
        env = {
            "TORCHELASTIC_RUN_ID": "x",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port - 1),
            "LOCAL_WORLD_SIZE": "2",
        }
        started = [start("env://", r, 2, **env, RANK=str(r), LOCAL_RANK=str(r)) for r in (0, 1)]
        answers = [result(process) for process in started]
        assert [answer.get("rank") for answer in answers] == [0, 1], answers


# -- bad starts --------------------------------------------------------------------------------------------------------


def test_what_differs_is_named_to_everyone(init: str) -> None:
    scripts = ["the script=train.py (sha256 1)", "the script=train.py (sha256 2)", "the script=train.py (sha256 1)"]
    for process in [start(init, rank, 3, same) for rank, same in enumerate(scripts)]:
        answer = result(process)
        assert answer["error"] == "RanksDisagree"
        assert "the script differs: train.py (sha256 1) on ranks 0, 2" in answer["text"]
        assert "train.py (sha256 2) on rank 1" in answer["text"]


def test_sizes_differ(init: str) -> None:
    for process in [start(init, 0, 2), start(init, 1, 3)]:
        answer = result(process)
        assert answer["error"] == "RanksDisagree"
        assert "the number of processes differs: 2 on rank 0" in answer["text"]
        assert "3 on rank 1" in answer["text"]


def test_two_processes_of_one_rank(init: str) -> None:
    for process in [start(init, 0, 3), start(init, 1, 3), start(init, 1, 3)]:
        answer = result(process)
        assert answer["error"] == "RanksDisagree"
        assert "two processes say they are rank 1" in answer["text"]


def test_timeouts_differ(init: str) -> None:
    """The first to lose patience settles it for all, and all say how long that one waited."""
    for process in [start(init, rank, 3, timeout=timeout) for rank, timeout in ((0, 50), (2, 3))]:
        answer = result(process)
        assert answer["error"] == "RanksMissing"
        assert "within 3 s" in answer["text"]


def test_a_rank_is_missing(init: str) -> None:
    for process in [start(init, rank, 3, timeout=2) for rank in (0, 2)]:
        answer = result(process)
        assert answer["error"] == "RanksMissing"
        assert "rank 1 of 3 did not come" in answer["text"]
        assert "ranks 0, 2" in answer["text"]


def test_rank_0_is_missing(init: str) -> None:
    answer = result(start(init, 1, 2, timeout=1))
    assert answer["error"] == "CommunicationError"
    assert "nobody listens there" in answer["text"]


@pytest.mark.parametrize(
    ("words", "tells"), [(None, "says nothing"), (b"SSH-2.0-x\r\n", "another program has that port")]
)
def test_a_foreign_program_has_the_port(words: bytes | None, tells: str) -> None:
    with foreign_program(words) as port:
        init = f"tcp://127.0.0.1:{port}"
        first, second = start(init, 0, 2, timeout=4), start(init, 1, 2, timeout=4)
        answer = result(first)
        assert answer["error"] == "WorldError"
        assert f"process {os.getpid()} has it" in answer["text"]
        answer = result(second)
        assert answer["error"] == "CommunicationError"
        assert tells in answer["text"]


def test_a_name_that_does_not_resolve() -> None:
    answer = result(start("tcp://no-such-host.invalid:29500", 1, 2, timeout=1))
    assert answer["error"] == "WorldError"
    assert "no-such-host.invalid" in answer["text"]
    assert "cannot resolve" in answer["text"]


def test_an_address_that_does_not_answer() -> None:
    # A listener whose queue is full drops every SYN, as a firewall does.
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for wire in waiting:
            wire.setblocking(False)
            wire.connect_ex(address)
        answer = result(start(f"tcp://127.0.0.1:{address[1]}", 1, 2, timeout=4))
        for wire in waiting:
            wire.close()
    assert answer["error"] == "CommunicationError"
    assert "no answer comes back" in answer["text"] or "says nothing" in answer["text"]


def test_secrets_differ(init: str) -> None:
    first, second = start(init, 0, 2, timeout=3, UNIDIST_SECRET="a"), start(init, 1, 2, timeout=3, UNIDIST_SECRET="b")
    assert result(first)["error"] == "RanksMissing"
    assert "UNIDIST_SECRET differs" in result(second)["text"]


def test_a_rank_that_dies_while_the_others_wait(init: str) -> None:
    first, second = start(init, 0, 3), start(init, 1, 3)
    assert second.stderr is not None
    while "rank 1 waits at" not in second.stderr.readline():
        assert second.poll() is None
    second.kill()
    second.communicate()
    answer = result(first)
    assert answer["error"] == "RanksMissing"
    assert "rank 1 on" in answer["text"]
    assert "ended while the ranks were meeting" in answer["text"]


def test_secret_files(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("x")
    path.chmod(0o644)
    with pytest.raises(WorldError, match="chmod 600"):
        places.secret({"UNIDIST_SECRET_FILE": str(path)})
    path.chmod(0o600)
    assert places.secret({"UNIDIST_SECRET_FILE": str(path)}) == "x"
    with pytest.raises(UsageError, match="both set"):
        places.secret({"UNIDIST_SECRET_FILE": str(path), "UNIDIST_SECRET": "y"})
    path.write_text(" ")
    with pytest.raises(UsageError, match="empty"):
        places.secret({"UNIDIST_SECRET_FILE": str(path)})
    with pytest.raises(UsageError, match="cannot be read"):
        places.secret({"UNIDIST_SECRET_FILE": str(tmp_path / "none")})


# -- file:// ---------------------------------------------------------------------------------------------------------


def meet(path: Path, rank: int, size: int, timeout: float = 60.0) -> World:
    return Meeting(detect({}, init=f"file://{path}", rank=rank, world_size=size), {}, timeout).complete()


def note(**change: Any) -> dict[str, Any]:
    found = {"address": outward_address(), "port": 1, "host": socket.gethostname(), "node": identity()}
    return found | {"pid": os.getpid(), "time": time.time(), "secret": "x"} | change


def leave(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


def ended_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_ranks_meet_at_a_file_and_leave_nothing(tmp_path: Path) -> None:
    for _ in range(2):
        answers = [result(p) for p in [start(f"file://{tmp_path}/meet", rank, 3, "times=3") for rank in (2, 1, 0)]]
        assert sorted(answer["local_rank"] for answer in answers) == [0, 1, 2]
        assert len({answer["port"] for answer in answers}) == 1
        assert list(tmp_path.iterdir()) == []


def test_missing_ranks_are_named_and_the_file_is_removed(tmp_path: Path) -> None:
    with pytest.raises(RanksMissing, match=r"ranks 1, 2 of 3 did not come to .*meet within 0\.2 s"):
        meet(tmp_path / "meet", 0, 3, 0.2)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(WorldError, match=r"rank 1 waited 0\.1 s for .*meet, which rank 0 writes"):
        meet(tmp_path / "meet", 1, 2, 0.1)


def test_rank_0_refuses_a_file_left_behind(tmp_path: Path) -> None:
    path = leave(tmp_path / "meet", json.dumps(note(pid=ended_pid(), time=0)))
    with pytest.raises(StaleRendezvous) as caught:
        meet(path, 0, 2)
    for text in (str(path), socket.gethostname(), "19", "has ended", "delete the file", "another name"):
        assert text in str(caught.value)
    assert list(tmp_path.iterdir()) == [path]
    leave(path, json.dumps(note()))
    with pytest.raises(StaleRendezvous, match=f"process {os.getpid()} on .* is still running"):
        meet(path, 0, 2)


@pytest.mark.parametrize("alive", [True, False])
def test_another_rank_refuses_a_file_left_behind(tmp_path: Path, alive: bool) -> None:
    # `alive`: the number of the dead writer has gone to another process; but nobody answers at its port.
    with socket.socket() as unused:
        unused.bind(("", 0))
        pid = os.getpid() if alive else ended_pid()
        path = leave(tmp_path / "meet", json.dumps(note(pid=pid, port=unused.getsockname()[1])))
        with pytest.raises(StaleRendezvous, match="does not answer" if alive else "has ended"):
            meet(path, 1, 2)


@pytest.mark.parametrize("text", ["precious", "[]", '{"address": 1}', json.dumps({"port": "x"})])
def test_a_file_of_something_else(tmp_path: Path, text: str) -> None:
    path = tmp_path / "meet"
    path.write_text(text)
    for rank in (0, 1):
        with pytest.raises(StaleRendezvous, match="not a rendezvous of unidist's"):
            meet(path, rank, 2)
    assert path.read_text() == text


def test_a_note_of_another_owner_or_open_to_others_is_refused(tmp_path: Path) -> None:
    path = leave(tmp_path / "meet", json.dumps(note()))
    path.chmod(0o644)
    with pytest.raises(WorldError, match="can be read or written by others"):
        meet(path, 1, 2)
    if os.geteuid() == 0:  # only root can give a file away
        path.chmod(0o600)
        os.chown(path, 12345, 12345)
        with pytest.raises(WorldError, match="belongs to user 12345"):
            meet(path, 1, 2)


def test_rank_0_of_another_host_without_an_address(tmp_path: Path) -> None:
    path = leave(tmp_path / "meet", json.dumps(note(host="elsewhere", node="elsewhere", address="127.0.0.1")))
    with pytest.raises(WorldError, match=r"elsewhere knows no address"):
        meet(path, 1, 2)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(WorldError, match=r"cannot write .*nowhere/meet"):
        meet(tmp_path / "nowhere" / "meet", 0, 2)


def test_the_note_is_private(tmp_path: Path) -> None:
    process = start(f"file://{tmp_path}/meet", 0, 2, timeout=3)
    while not (tmp_path / "meet").exists():
        time.sleep(0.01)
    assert (tmp_path / "meet").stat().st_mode & 0o077 == 0
    assert result(process)["error"] == "RanksMissing"


def test_a_world_without_a_place(tmp_path: Path) -> None:
    with pytest.raises(UnidistError, match="does not say where rank 0 is"):
        Meeting(World(0, 2, source="somewhere"), {}, 1.0).complete()


def test_who_comes_late_to_a_refused_meeting_hears_why(init: str) -> None:
    """And the port is free again for the next start."""
    late = start(init, 2, 3, COMES_LATE="yes")
    first = [result(process) for process in [start(init, 0, 3), start(init, 1, 2)]]
    assert late.stdin is not None
    late.stdin.write("now\n")
    late.stdin.flush()
    for answer in [*first, result(late)]:
        assert "the number of processes differs" in answer["text"], answer
    again = [result(process) for process in [start(init, rank, 2) for rank in (0, 1)]]
    assert [answer["rank"] for answer in again] == [0, 1]

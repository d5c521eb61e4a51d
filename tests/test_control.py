"""The control plane: who may speak, what is agreed, what is said when someone is missing, and that nothing stays.

Run as a script it prints what `agree` costs: `python tests/test_control.py [ranks]`.
"""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import pytest

from unidist.control import MAX_BODY, Beat, Control, ControlServer, Heart, agree, connect_from_env, values
from unidist.errors import CommunicationError, RanksDisagree, RanksMissing, UsageError, WorldError


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@pytest.fixture
def server() -> Iterator[ControlServer]:
    with ControlServer() as server:
        yield server


@pytest.fixture
def control(server: ControlServer) -> Iterator[Control]:
    control = Control(server.url, server.token)
    yield control
    control.close()


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Call all at once, each in a thread; an exception is given back in place of the result."""

    def one(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except CommunicationError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(one, calls))


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until, "it never happened"
        time.sleep(0.005)


# -- keys ----------------------------------------------------------------------------------------------------


def test_keys(server: ControlServer, control: Control) -> None:
    assert control.get("a") is None
    control.put("a", b"\0\xff")
    assert control.get("a") == server.get("a") == b"\0\xff"
    server.put("a", b"")
    assert control.get("a") == b""
    control.delete("a")
    control.delete("a")
    assert control.get("a") is None


def test_any_text_is_a_key(control: Control) -> None:
    keys = ["a b", "a/b", "a%2Fb", "ä?wait=9", "#", "../a"]
    for key in keys:
        control.put(key, key.encode())
    assert [control.get(key) for key in keys] == [key.encode() for key in keys]


def test_get_waits_for_the_value(control: Control) -> None:
    got = together(lambda: control.get("late", wait=60), lambda: control.put("late", b"here"))
    assert got == [b"here", None]
    assert control.get("never", wait=0.01) is None


def test_many_keys_at_once(control: Control) -> None:
    def work(worker: int) -> list[bytes | None]:
        for i in range(50):
            control.put(f"{worker}/{i}", f"{worker} {i}".encode())
        return [control.get(f"{worker ^ 1}/{i}", wait=60) for i in range(50)]

    with ThreadPoolExecutor(8) as pool:
        for worker, got in enumerate(pool.map(work, range(8))):
            assert got == [f"{worker ^ 1} {i}".encode() for i in range(50)]


# -- who may speak -------------------------------------------------------------------------------------------


def test_wrong_token(server: ControlServer, control: Control) -> None:
    stranger = Control(server.url, "0" * 32)
    with pytest.raises(CommunicationError, match=r"refused this process's token.*unidist run"):
        stranger.put("a", b"1")
    assert control.get("a") is None
    stranger.close()


def test_every_server_has_its_own_token(server: ControlServer) -> None:
    with ControlServer() as other:
        assert other.token != server.token
        assert len(other.token) == 32


def test_bodies_are_bounded(control: Control) -> None:
    with pytest.raises(UsageError, match="bytes at a time"):
        control.put("a", bytes(MAX_BODY + 1))
    control.put("a", bytes(MAX_BODY))
    assert control.get("a") == bytes(MAX_BODY)


def test_stored_bytes_are_bounded(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "MAX_STORED", 1 << 20)
    control.put("a", bytes(1 << 20))
    with pytest.raises(CommunicationError, match="keeps 1 MB at most"):
        control.put("b", b"1")
    control.delete("a")
    control.put("b", b"1")


@pytest.mark.parametrize(
    ("op", "header"),
    [
        ("gather", {}),
        ("gather", {"key": "a", "rank": 7, "size": 2}),
        ("gather", {"key": "a", "rank": -2, "size": 2}),
        ("gather", {"key": "a", "rank": "0", "size": 2}),
        ("gather", {"key": "a", "rank": 0, "size": 2**40}),
        ("gather", {"key": "a", "rank": 0, "size": 2, "same": 3}),
        ("get", {"keys": ["a"], "wait": "x"}),
        ("get", {"keys": 3}),
        ("put", {"key": {}}),
        ("put", {"key": "x" * 5000}),
        ("add", {"key": "a", "amount": "much"}),
        ("compare_set", {"key": "a", "expected": 3}),
        ("beat", {"role": "worker"}),
        ("beat", {"role": 3, "rank": [], "step": None}),
        ("fails", {"what": "x"}),
    ],
)
def test_nonsense_is_answered_and_harms_nobody(server: ControlServer, control: Control, op: str, header: Any) -> None:
    with pytest.raises(CommunicationError, match="refused"):
        control.ask(op, **header)
    control.put("a", b"still there")
    assert control.get("a") == b"still there"
    assert server.beats() == {}


def test_add_append_compare(control: Control) -> None:
    assert control.add("n", 3) == 3
    assert control.add("n", -5) == -2
    control.append("t", b"ab")
    control.append("t", b"c")
    assert control.get_all(["n", "t", "none"]) == [b"-2", b"abc", None]
    assert control.compare_set("c", b"", b"first") == b"first"
    assert control.compare_set("c", b"wrong", b"x") == b"first"
    assert control.compare_set("c", b"first", b"second") == b"second"
    assert control.compare_set("d", b"expected", b"x") == b"expected"
    assert control.held(["n", "c"])
    assert not control.held(["n", "d"])
    assert control.count("") == 3
    with pytest.raises(CommunicationError, match="no number"):
        control.add("t", 1)


def test_get_waits_for_all_of_several(control: Control) -> None:
    got = together(
        lambda: control.get_all(["p", "q"], wait=60), lambda: control.put("q", b"2"), lambda: control.put("p", b"1")
    )
    assert got[0] == [b"1", b"2"]


def test_bound_to_one_interface_only() -> None:
    with ControlServer("127.0.0.2") as server, socket.socket() as wire:
        assert server.url == f"tcp://127.0.0.2:{server.port}"
        with pytest.raises(ConnectionRefusedError):
            wire.connect(("127.0.0.1", server.port))
        control = Control(server.url, server.token)
        assert control.get("a") is None
        control.close()
    with ControlServer() as server:
        assert server.host == "127.0.0.1"


# -- gather and agree ----------------------------------------------------------------------------------------


def test_gather(server: ControlServer, control: Control) -> None:
    values: list[Any] = [{"a": [1]}, None, "x"]
    for _ in range(2):  # the same key again: the first use left nothing
        got = together(*(lambda r=r: control.gather("k", r, 3, values[r], 60) for r in range(3)))
        assert got == [values] * 3
    assert server._requests.gatherings._open == {}


def test_gather_names_the_missing_to_everyone(control: Control) -> None:
    # Rank 3 would wait longer, but learns at once that rank 0 gave up; so does rank 1, which comes too late.
    errors = together(
        lambda: control.gather("start", 0, 4, 0, 0.2),
        lambda: control.gather("start", 3, 4, 3, 600),
    )
    errors += together(lambda: control.gather("start", 1, 4, 1, 600))
    for error in errors:
        assert isinstance(error, RanksMissing)
        assert "ranks 1, 2 did not come to 'start' within 0.2 s" in str(error)
        assert "ranks 0, 3 did" in str(error)


@pytest.mark.parametrize(
    ("rank", "size", "says"), [(1, 2, "two processes say they are rank 1"), (0, 3, "rank 0 .* said there are 3 ranks")]
)
def test_a_rank_twice_and_another_size_are_told_to_everyone(
    server: ControlServer, control: Control, rank: int, size: int, says: str
) -> None:
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(control.gather, "k", 1, 2, "one", 60)
        wait_until(lambda: bool(server._requests.gatherings._open))
        for call in (lambda: control.gather("k", rank, size, None, 60), first.result):
            with pytest.raises(RanksDisagree, match=says):
                call()


def test_ranks_that_nobody_has_numbered(control: Control) -> None:
    got = together(*(lambda n=n: control.gather("k", -1, 3, n, 60) for n in range(3)))
    assert got[0] == got[1] == got[2]
    assert sorted(got[0]) == [0, 1, 2]


def test_who_leaves_a_gathering_is_named(server: ControlServer, control: Control) -> None:
    other = Control(server.url, server.token)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(one.gather, "k", rank, 3, None, 60) for rank, one in enumerate((control, other))]
        wait_until(lambda: any(len(each.came) == 2 for each in server._requests.gatherings._open.values()))
        other.close()
        with pytest.raises(RanksMissing, match=r"rank 1 on .* left 'k'"):
            waiting[0].result()
        with pytest.raises(CommunicationError, match="does not answer"):
            waiting[1].result()


def test_agree(control: Control) -> None:
    def several(rank: int) -> None:
        for sequence in range(3):
            agree(control, sequence, rank, 3, "barrier", 60)

    assert together(*(lambda r=r: several(r) for r in range(3))) == [None] * 3


def test_disagreement_is_told_to_everyone(control: Control) -> None:
    wishes = [f"all_reduce mean float32 ({n},)" for n in (3, 4, 3, 3, 3)]
    errors = together(*(lambda r=r: agree(control, 7, r, 5, wishes[r], 60) for r in range(5)))
    for error in errors:
        assert isinstance(error, RanksDisagree)
        assert str(error) == (
            "the ranks want different things in collective 7: "
            "ranks 0, 2-4: all_reduce mean float32 (3,); rank 1: all_reduce mean float32 (4,)"
        )


def test_a_rank_that_does_not_come_to_a_collective(control: Control) -> None:
    errors = together(*(lambda r=r: agree(control, 7, r, 3, "barrier", 0.2 + 60 * r) for r in (0, 2)))
    for error in errors:
        assert isinstance(error, RanksMissing)
        assert "rank 1 did not come to collective 7" in str(error)
        assert "ranks 0, 2: barrier" in str(error)


# -- the end -------------------------------------------------------------------------------------------------


def test_close_ends_waits_and_answers_what_is_complete() -> None:
    server = ControlServer().start()
    control = Control(server.url, server.token)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(control.gather, "k", 0, 2, None, 600)
        asking = pool.submit(control.get, "k", 600)
        requests = server._requests
        wait_until(lambda: bool(requests.gatherings._open) and bool(requests.values._waiting))
        server.close()
        for each in (waiting, asking):
            with pytest.raises(CommunicationError, match=r"closing|does not answer"):
                each.result()
    server.close()  # twice does no harm
    with pytest.raises(CommunicationError, match=r"does not answer.*has ended"):
        control.put("k", b"")
    control.close()


def test_close_without_start() -> None:
    ControlServer().close()


def test_a_complete_gather_is_answered_though_the_server_closes_at_once() -> None:
    for _ in range(20):
        server = ControlServer().start()
        other = Control(server.url, server.token)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(other.gather, "k", 1, 2, "one", 60)
            mine = Control(server.url, server.token)
            assert mine.gather("k", 0, 2, "zero", 60) == ["zero", "one"]
            server.close()
            assert answer.result() == ["zero", "one"]
        mine.close()
        other.close()


def test_a_peer_that_says_nothing_does_not_hold_up_the_end() -> None:
    with ControlServer() as server, socket.create_connection((server.host, server.port)) as silent:
        wait_until(lambda: len(server._connections) == 1)
        silent.sendall(b"unid")


# -- heartbeats ----------------------------------------------------------------------------------------------


def test_beats(server: ControlServer, control: Control) -> None:
    def at(operation: str, step: int, moves: int = 0, paused: bool = False) -> Beat:
        control.beat("worker", 1, step, operation, moves, paused)
        return server.beats()["worker 1"]

    first = at("step", 4)
    assert (first.role, first.rank, first.step, first.operation, first.paused) == ("worker", 1, 4, "step", False)
    time.sleep(0.01)
    still = at("step", 4)
    assert still.stuck > still.silent  # heard again, but no further
    moved = at("step", 5)
    assert moved.stuck == moved.silent
    time.sleep(0.01)
    again = at("step", 5, moves=1)
    assert again.stuck == again.silent
    assert at("save", 5, paused=True).stuck == 0
    control.beat("server", 1, 0, "serve", 0, False)
    assert set(server.beats()) == {"worker 1", "server 1"}
    control.leave("worker", 1)
    left = server.beats()["worker 1"]
    assert (left.operation, left.paused, left.stuck) == ("left", True, 0.0)


def test_heart(server: ControlServer, control: Control) -> None:
    def said(operation: str, step: int, paused: bool = False) -> bool:
        beat = server.beats().get("worker 2")
        return beat is not None and (beat.operation, beat.step, beat.paused) == (operation, step, paused)

    with Heart(control, 2, interval=0.005) as heart:
        wait_until(lambda: said("start-up", 0))
        heart.at("step", 1)
        wait_until(lambda: said("step", 1))
        with heart.pause(), heart.pause():
            wait_until(lambda: said("step", 1, paused=True))
        wait_until(lambda: said("step", 1))
        heart.at("all_reduce", 1)
        wait_until(lambda: said("all_reduce", 1))
    assert said("left", 1, paused=True)


def test_a_step_that_was_broken_off_is_not_counted_once_the_script_goes_on(control: Control) -> None:
    heart = Heart(control, 0)
    heart.stepped()  # the engine is up
    heart.at("step", 0, training=True)
    heart.at("all_gather", 0)  # the loss may call others
    assert heart.place == (3, True)
    heart.left_step()
    assert heart.place == (3, True)  # others are in it
    heart.at("step", 0, training=True)
    assert heart.place == (3, True)
    heart.stepped()
    heart.left_step()  # of a step that needs nobody
    heart.at("leave", 0)
    assert heart.place == (4, False)


def test_being_twice_at_the_same_place_is_progress(server: ControlServer, control: Control) -> None:
    def moves() -> int:
        beat = server.beats().get("worker 0")
        return -1 if beat is None else beat.moves

    with Heart(control, 0, interval=0.005) as heart:
        for count in range(3):
            wait_until(lambda count=count: moves() == count)
            heart.at("step", 1)


def test_a_heart_outlives_its_server_in_silence(capfd: pytest.CaptureFixture[str]) -> None:
    server = ControlServer().start()
    control = Control(server.url, server.token)
    heart = Heart(control, 0, interval=0.005).start()
    wait_until(lambda: "worker 0" in server.beats())
    server.close()
    time.sleep(0.05)  # several more beats
    heart.at("step", 1)
    with heart.pause():
        pass
    heart.stop()
    control.close()
    assert capfd.readouterr() == ("", "")


def test_a_heart_without_a_server_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with Heart(Control(f"tcp://127.0.0.1:{unused.getsockname()[1]}", "x"), 0, interval=0.005):
            time.sleep(0.05)
    assert capfd.readouterr() == ("", "")


# -- from the environment ------------------------------------------------------------------------------------


def test_connect_from_env(server: ControlServer) -> None:
    assert connect_from_env({}) is None
    control = connect_from_env({"UNIDIST_CONTROL": server.url, "UNIDIST_TOKEN": server.token})
    assert control is not None
    assert control.get("a") is None
    control.close()
    with pytest.raises(WorldError, match="UNIDIST_TOKEN is not set"):
        connect_from_env({"UNIDIST_CONTROL": server.url})
    with pytest.raises(UsageError, match="tcp://host:port"):
        connect_from_env({"UNIDIST_CONTROL": "localhost", "UNIDIST_TOKEN": "x"})


# -- what it costs -------------------------------------------------------------------------------------------


def _agree_often(url: str, token: str, rank: int, size: int, rounds: int) -> list[float]:
    control, times = Control(url, token), []
    for sequence in range(rounds):
        before = time.perf_counter()
        agree(control, sequence, rank, size, "all_reduce mean float32 (1024, 1024)", 60)
        times.append(time.perf_counter() - before)
    return times[rounds // 10 :]


def agree_cost(size: int = 2, rounds: int = 2000) -> list[float]:
    """Seconds that each `agree` took, over processes of their own, in order of size."""
    context = multiprocessing.get_context("spawn")
    with ControlServer() as server, context.Pool(size) as pool:
        jobs = [(server.url, server.token, rank, size, rounds) for rank in range(size)]
        return sorted(chain.from_iterable(pool.starmap(_agree_often, jobs, chunksize=1)))


if __name__ == "__main__":
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    seconds = agree_cost(ranks)
    low, high = seconds[len(seconds) // 20], seconds[-len(seconds) // 20]
    median = statistics.median(seconds)
    print(f"agree at {ranks} ranks: {median * 1e3:.2f} ms, 90 % from {low * 1e3:.2f} to {high * 1e3:.2f}")

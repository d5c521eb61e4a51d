"""The control plane: what it keeps, who may speak, and that nothing stays at its end."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from control_support import together
from unidist.control import MAX_BODY, Control, ControlServer, connect_from_env, values
from unidist.errors import CommunicationError, UsageError, WorldError

pytest_plugins = ["control_support"]
pytestmark = pytest.mark.usefixtures("no_thread_stays")


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


# -- the end -------------------------------------------------------------------------------------------------


def test_close_ends_waits_and_answers_what_is_complete() -> None:
    server = ControlServer().start()
    control = Control(server.url, server.token)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(control.gather, "k", 0, 2, None, 600)
        asking = pool.submit(control.get, "k", 600)
        for _ in range(10):
            control.count("")  # some round trips later both are most likely there; one that is not is told the same
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
        assert silent.recv(1)  # it was let in, and is asked who it is
        silent.sendall(b"unid")

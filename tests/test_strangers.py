"""The control plane against those who do not belong to the job: bad input ends its own connection, and nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from unidist.control import Control, ControlServer, NotOurs, protocol
from unidist.control import server as module
from unidist.control.protocol import MAGIC, Frames, pack

SECRET = "between us"


@pytest.fixture
def server() -> Iterator[ControlServer]:
    with ControlServer(token=SECRET) as server:
        yield server


@contextlib.contextmanager
def wire(server: ControlServer) -> Iterator[socket.socket]:
    with socket.create_connection((server.host, server.port), 60) as wire:
        yield wire


def greeting(wire: socket.socket) -> dict[str, Any]:
    frames = Frames()
    while True:
        for header, _ in frames:
            return header
        data = wire.recv(4096)
        assert data, "closed"
        frames.feed(data)


def hello(wire: socket.socket, secret: str = SECRET, **more: Any) -> bytes:
    nonce = protocol.challenge()
    proof = protocol.proof(secret, "client", greeting(wire)["challenge"], nonce)
    return MAGIC + pack({"nonce": nonce, "proof": proof, **more})


def closed(wire: socket.socket) -> bool:
    """Whether the server ends the connection, whatever it says before."""
    with contextlib.suppress(ConnectionError):
        while wire.recv(4096):
            pass
    return True


def garbage(wire: socket.socket) -> None:
    wire.sendall(random.Random(0).randbytes(100_000))


def http(wire: socket.socket) -> None:
    wire.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")


def huge_length(wire: socket.socket) -> None:
    wire.sendall(MAGIC + struct.pack("!II", 2**32 - 1, 2**32 - 1))


def large_hello(wire: socket.socket) -> None:
    wire.sendall(MAGIC + struct.pack("!II", protocol.MAX_HELLO + 1, 0) + b"x" * 5000)


def body_before_proof(wire: socket.socket) -> None:
    wire.sendall(MAGIC + pack({"nonce": "x"}, b"y" * 1000))


def not_json(wire: socket.socket) -> None:
    wire.sendall(MAGIC + struct.pack("!II", 4, 0) + b"\xff{{{")


def not_an_object(wire: socket.socket) -> None:
    wire.sendall(MAGIC + struct.pack("!II", 2, 0) + b"[]")


def deep_json(wire: socket.socket) -> None:
    wire.sendall(MAGIC + struct.pack("!II", 4000, 0) + b"[" * 4000)


def no_proof(wire: socket.socket) -> None:
    wire.sendall(MAGIC + pack({"op": "put", "key": "a", "id": 1}))


def odd_types(wire: socket.socket) -> None:
    wire.sendall(MAGIC + pack({"nonce": 3, "proof": ["x"], "job": {}}))


def wrong_secret(wire: socket.socket) -> None:
    wire.sendall(hello(wire, "guessed"))


def half_a_handshake(wire: socket.socket) -> None:
    wire.sendall(hello(wire)[:40])  # and then nothing more


def silence(wire: socket.socket) -> None:
    pass


def other_job(wire: socket.socket) -> None:
    wire.sendall(hello(wire, job="another"))


def garbage_after_proof(wire: socket.socket) -> None:
    wire.sendall(hello(wire) + b"\xff" * 64)


def unknown_operation(wire: socket.socket) -> None:
    wire.sendall(hello(wire) + pack({"op": "_close", "id": 1}))


def odd_number(wire: socket.socket) -> None:
    wire.sendall(hello(wire) + pack({"op": "put", "key": "a", "id": {}}))


def half_a_character(wire: socket.socket) -> None:
    wire.sendall(MAGIC + pack({"nonce": "\ud800", "proof": "x"}))


def too_large_a_number(wire: socket.socket) -> None:
    number = b'{"op": "add", "key": "n", "amount": Infinity, "id": 1}'
    wire.sendall(hello(wire) + struct.pack("!II", len(number), 0) + number)
    wire.shutdown(socket.SHUT_WR)


def reset(wire: socket.socket) -> None:
    """A hello, and no wish to hear the answer."""
    said = hello(wire)
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wire.sendall(said)
    wire.close()
    raise ConnectionResetError


def reflected(wire: socket.socket) -> None:
    """The server's own words, sent back to it."""
    challenge = greeting(wire)["challenge"]
    wire.sendall(MAGIC + pack({"challenge": challenge, "nonce": challenge, "proof": challenge}))


STRANGERS = [
    garbage, http, huge_length, large_hello, body_before_proof, not_json, not_an_object, deep_json, no_proof, odd_types,
    wrong_secret, half_a_handshake, silence, other_job, garbage_after_proof, unknown_operation, odd_number, reflected,
    half_a_character, too_large_a_number, reset,
]  # fmt: skip


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_stranger_ends_its_own_connection_only(
    server: ControlServer, stranger: Callable[[socket.socket], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HANDSHAKE", 0.5)
    control = Control(server.url, SECRET)
    control.put("a", b"mine")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(control.gather, "k", 0, 2, "zero", 60)
        with wire(server) as one, contextlib.suppress(ConnectionError):
            stranger(one)
            assert closed(one)
        assert control.get("a") == b"mine"
        other = Control(server.url, SECRET)
        assert other.gather("k", 1, 2, "one", 60) == ["zero", "one"] == waiting.result()
        other.close()
    control.close()


def test_who_drips_is_not_waited_for(server: ControlServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time for a handshake is counted from its beginning, not from the last byte."""
    monkeypatch.setattr(module, "HANDSHAKE", 0.5)
    with wire(server) as one:
        text, sent = hello(one), 0
        with contextlib.suppress(OSError):
            for byte in text:
                one.sendall(bytes([byte]))
                sent += 1
                time.sleep(0.05)
        assert sent < len(text)
        assert closed(one)


def test_a_recorded_hello_is_worth_nothing(server: ControlServer) -> None:
    with wire(server) as one, wire(server) as other:
        recorded = hello(one)
        one.sendall(recorded)
        assert "welcome" in greeting_after(one)
        greeting(other)
        other.sendall(recorded)
        assert greeting_after(other)["refused"] == "secret"


def greeting_after(wire: socket.socket) -> dict[str, Any]:
    """The answer to a hello, on a wire whose greeting was read."""
    head = wire.recv(8, socket.MSG_WAITALL)
    length, _ = struct.unpack("!II", head)
    answer: dict[str, Any] = json.loads(wire.recv(length, socket.MSG_WAITALL))
    return answer


def test_a_false_server_is_not_believed() -> None:
    """It took the port, and does not know the secret: no client takes it for its own, and none tells it the secret."""
    heard: list[bytes] = []

    def pretend(false: socket.socket) -> None:
        one, _ = false.accept()
        with one:
            one.sendall(MAGIC + pack({"challenge": "0" * 32}))
            heard.append(one.recv(4096))
            one.sendall(pack({"welcome": "0" * 64, "seen": "", "reached": ""}))
            one.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as false:
        thread = threading.Thread(target=pretend, args=(false,))
        thread.start()
        with pytest.raises(NotOurs, match="does not know this job's secret"):
            Control(protocol.url(*false.getsockname()), SECRET).put("a", b"private")
        thread.join()
    assert SECRET.encode() not in heard[0]
    assert b"private" not in heard[0]


def test_a_crowd_of_silent_strangers_costs_nothing(server: ControlServer) -> None:
    """No thread and few files each, and a rank gets in between them by one attempt, though thousands came before it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)), hard))
    member = Control(server.url, SECRET)
    member.put("a", b"1")
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    crowd = []
    try:
        for _ in range(2500):
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex((server.host, server.port))
            crowd.append(one)
        late = Control(server.url, SECRET, timeout=120)
        assert late.get("a") == b"1"
        assert member.get("a") == b"1"
        assert threading.active_count() <= threads + 1  # the late one's reader
        assert len(os.listdir("/proc/self/fd")) - files - len(crowd) <= module.STRANGERS + 20
        late.close()
    finally:
        for one in crowd:
            one.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    member.close()


def test_a_server_short_of_files_goes_on(server: ControlServer) -> None:
    """As `ulimit -n` of a supervisor: those who are in stay in, and who comes later gets in when there is room."""
    member = Control(server.url, SECRET)
    member.put("a", b"1")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    strangers = [socket.create_connection((server.host, server.port)) for _ in range(20)]
    used = max(int(name) for name in os.listdir("/proc/self/fd")) + 1
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used, hard))
        with contextlib.suppress(OSError):
            strangers += [socket.socket() for _ in range(used)]
        assert member.get("a") == b"1"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for one in strangers:
            one.close()
    late = Control(server.url, SECRET)
    assert late.get("a") == b"1"
    late.close()
    member.close()

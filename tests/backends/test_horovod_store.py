"""What Horovod's ranks tell each other at the start: a store closed to strangers, and what Horovod itself is told."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Iterator

import pytest

from unidist.control import Control, ControlServer
from unidist.control.peers import Peers
from unidist.errors import UsageError, WorldError
from unidist_horovod import meeting, store
from unidist_horovod.store import Store


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

"""The control plane: a small authenticated key-value service, for what ranks must say outside their engine.

One `ControlServer` runs beside the launcher, or on rank 0 when something else launched the job; every rank
holds a `Control`. Its users: the check that all ranks are about to do the same (`agree`), heartbeats
(`Heart`) and the file:// rendezvous. Plain HTTP, a token for each job, bound to the one interface it is told.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import socketserver
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPException, HTTPResponse
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from unidist.errors import CommunicationError, RanksDisagree, RanksMissing, UsageError, WorldError

MAX_BODY = 16 * 2**20

Answer = tuple[int, bytes]


# -- the server ----------------------------------------------------------------------------------------------


# How a process may have left: at its end, or because of an error, which it may keep to itself.
LEFT, GAVE_UP = "left", "left after an error"


@dataclass(frozen=True)
class Beat:
    """The last that was heard of one process. Ages are in seconds, by the server's clock."""

    role: str
    rank: int
    step: int
    operation: str
    moves: int  # how often it got somewhere; where ranks go in lockstep, equal in the same place
    paused: bool  # it said that no progress is to be expected for a while
    silent: float  # since it was last heard
    stuck: float  # since it last got anywhere; 0 while paused


@dataclass
class _Pulse:
    report: dict[str, Any]
    heard: float
    moved: float


@dataclass
class _Gather:
    size: int
    ready: threading.Condition
    values: dict[int, Any] = field(default_factory=dict)
    answer: Answer | None = None
    answered: int = 0


class _Store:
    """What the server knows. Each request runs in a thread of its own, and waits here."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._values: dict[str, bytes] = {}
        self._gathers: dict[str, _Gather] = {}
        self._pulses: dict[str, _Pulse] = {}
        self._closed = False

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._arrived.notify_all()
            for gather in self._gathers.values():
                gather.ready.notify_all()

    def put(self, key: str, value: bytes) -> None:
        with self._lock:
            self._values[key] = value
            self._arrived.notify_all()

    def get(self, key: str, wait: float) -> bytes | None:
        with self._lock:
            self._arrived.wait_for(lambda: self._closed or key in self._values, wait)
            return self._values.get(key)

    def delete(self, key: str) -> None:
        with self._lock:
            self._values.pop(key, None)

    def gather(self, key: str, rank: int, size: int, value: Any, timeout: float) -> Answer:
        with self._lock:
            gather = self._gathers.get(key)
            if gather is None:
                gather = self._gathers[key] = _Gather(size, threading.Condition(self._lock))
            if gather.size != size:
                said = f"{_ranks(gather.values)} said {gather.size}"
                return HTTPStatus.CONFLICT, f"rank {rank} says there are {size} ranks, {said}".encode()
            if rank in gather.values:
                return (
                    HTTPStatus.CONFLICT,
                    f"two processes say they are rank {rank}: give each its own".encode(),
                )
            gather.values[rank] = value
            if gather.answer is None and len(gather.values) == size:
                everything = [gather.values[r] for r in range(size)]
                gather.answer = HTTPStatus.OK, json.dumps(everything).encode()
                gather.ready.notify_all()
            if gather.answer is None:
                gather.ready.wait_for(lambda: self._closed or gather.answer is not None, timeout)
            if gather.answer is None and self._closed:
                return HTTPStatus.SERVICE_UNAVAILABLE, b"the control plane is closing"
            if gather.answer is None:
                # One rank giving up settles it for all: who waits longer, or comes later, waits in vain.
                missing = sorted(set(range(size)) - set(gather.values))
                failure = {"missing": missing, "came": gather.values, "waited": timeout}
                gather.answer = HTTPStatus.REQUEST_TIMEOUT, json.dumps(failure).encode()
                gather.ready.notify_all()
            gather.answered += 1
            if gather.answered == size:
                del self._gathers[key]
            return gather.answer

    def beat(self, report: dict[str, Any]) -> None:
        name, now = f"{report['role']} {report['rank']}", time.monotonic()
        with self._lock:
            last = self._pulses.get(name)
            # The process counts its moves; a clock of its own would not be comparable with ours.
            still = last is not None and last.report == report and not report["paused"]
            self._pulses[name] = _Pulse(report, now, last.moved if last is not None and still else now)

    def leave(self, name: str, how: str) -> None:
        with self._lock:
            if name in self._pulses:
                self._pulses[name].report |= {"operation": how, "paused": True}

    def beats(self) -> dict[str, Beat]:
        now = time.monotonic()
        with self._lock:
            pulses = dict(self._pulses)
        return {
            name: Beat(
                role=pulse.report["role"],
                rank=pulse.report["rank"],
                step=pulse.report["step"],
                operation=pulse.report["operation"],
                moves=pulse.report["moves"],
                paused=pulse.report["paused"],
                silent=now - pulse.heard,
                stuck=0.0 if pulse.report["paused"] else now - pulse.moved,
            )
            for name, pulse in pulses.items()
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = 30  # for strangers; lifted with the first valid token, since ranks keep their connection
    server: _Server

    def _serve(self) -> None:
        given = self.headers.get("Authorization", "").encode("latin-1", "replace")
        if not hmac.compare_digest(given, self.server.authorization):
            return self._refuse(HTTPStatus.UNAUTHORIZED, "wrong or missing token")
        self.connection.settimeout(None)
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            return self._refuse(HTTPStatus.LENGTH_REQUIRED, "Content-Length is missing")
        if int(length) > MAX_BODY:
            return self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {MAX_BODY} bytes")
        body = self.rfile.read(int(length))
        try:
            status, answer = self._act(body)
        except (ValueError, TypeError, KeyError) as error:
            status, answer = HTTPStatus.BAD_REQUEST, f"{type(error).__name__}: {error}".encode()
        self._answer(status, answer)

    do_GET = do_PUT = do_POST = do_DELETE = _serve

    def _act(self, body: bytes) -> Answer:
        store = self.server.store
        url = urlsplit(self.path)
        kind, _, name = unquote(url.path).lstrip("/").partition("/")
        match self.command, kind:
            case "POST", "gather":
                return store.gather(name, **json.loads(body))
            case "POST", "beat":
                store.beat(json.loads(body))
            case "DELETE", "beat":
                store.leave(name, body.decode() or LEFT)
            case "PUT", "key":
                store.put(name, body)
            case "GET", "key":
                value = store.get(name, float(parse_qs(url.query).get("wait", ["0"])[0]))
                return (HTTPStatus.NOT_FOUND, b"") if value is None else (HTTPStatus.OK, value)
            case "DELETE", "key":
                store.delete(name)
            case _:
                return HTTPStatus.NOT_FOUND, b"no such service"
        return HTTPStatus.OK, b""

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self.close_connection = True  # its body was not read, so nothing after it can be understood
        self._answer(status, why.encode())

    def _answer(self, status: int, body: bytes) -> None:
        head = f"HTTP/1.1 {int(status)} {HTTPStatus(status).phrase}\r\nContent-Length: {len(body)}\r\n"
        if self.close_connection:
            head += "Connection: close\r\n"
        self.wfile.write(f"{head}\r\n".encode() + body)  # one packet: two would meet the peer's delayed ACK

    def log_message(self, *_: object) -> None:
        pass


class _Server(HTTPServer):
    """A thread for each connection, and a way to end them, which the standard ThreadingHTTPServer lacks."""

    request_queue_size = 512

    def __init__(self, host: str, port: int, token: str) -> None:
        self.store = _Store()
        self.authorization = f"Bearer {token}".encode()
        self._connections: dict[threading.Thread, socket.socket] = {}
        self._guard = threading.Lock()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        # Not HTTPServer's, which asks the DNS for our name: that can take seconds.
        socketserver.TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        thread = threading.Thread(target=self._converse, args=(request, client_address), daemon=True)
        with self._guard:
            self._connections[thread] = request
        thread.start()

    def _converse(self, request: socket.socket, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except OSError:
            pass  # the peer went away: its launcher reports that, not we
        finally:
            with self._guard:
                self._connections.pop(threading.current_thread(), None)
                self.shutdown_request(request)

    def end_connections(self) -> None:
        self.store.close()
        # First only stop reading, so that answers on their way still arrive; then end those that do not read.
        for how in (socket.SHUT_RD, socket.SHUT_RDWR):
            with self._guard:
                connections = dict(self._connections)
                for connection in connections.values():
                    with contextlib.suppress(OSError):
                        connection.shutdown(how)
            until = time.monotonic() + 2
            for thread in connections:
                thread.join(max(0, until - time.monotonic()))


class ControlServer:
    """The service. Binds at once (port 0: a free one), answers after `start()`, or inside `with`."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0, token: str | None = None) -> None:
        self.token = token or secrets.token_hex(16)
        self._http = _Server(host, port, self.token)
        self.host, self.port = host, int(self._http.server_address[1])
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def start(self) -> ControlServer:
        if self._thread is None:
            self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
            self._thread.start()
        return self

    def close(self) -> None:
        if self._thread is not None:
            with contextlib.suppress(OSError):  # wakes serve_forever at once, not at its next poll
                self._http.socket.shutdown(socket.SHUT_RDWR)
            self._http.shutdown()
            self._thread.join()
            self._thread = None
        self._http.server_close()
        self._http.end_connections()

    def __enter__(self) -> ControlServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def put(self, key: str, value: bytes) -> None:
        self._http.store.put(key, value)

    def get(self, key: str, wait: float = 0.0) -> bytes | None:
        return self._http.store.get(key, wait)

    def beats(self) -> dict[str, Beat]:
        """Every process that was ever heard of, by "role rank"; those that left (LEFT, GAVE_UP) are paused for good."""
        return self._http.store.beats()


# -- the client ----------------------------------------------------------------------------------------------


class Control:
    """A rank's side. Safe to share between threads: each has a connection of its own, which it keeps.

    Nothing is retried: an operation that fails raises `CommunicationError`, and its connection is dropped.
    """

    def __init__(self, url: str, token: str, timeout: float = 30.0) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or not parts.port:
            raise UsageError(f"the control plane's address is {url!r}; expected http://host:port")
        self.url = url
        self.timeout = timeout
        self._address = (parts.hostname, parts.port)
        self._common = f"Host: {parts.netloc}\r\nAuthorization: Bearer {token}\r\n"
        self._mine = threading.local()
        self._all: set[socket.socket] = set()
        self._guard = threading.Lock()

    def put(self, key: str, value: bytes) -> None:
        self._ask("PUT", f"/key/{quote(key)}", value)

    def get(self, key: str, wait: float = 0.0) -> bytes | None:
        """The value, or None when it is not there, nor came within `wait` seconds."""
        status, value = self._call("GET", f"/key/{quote(key)}?wait={wait}", b"", wait)
        return None if status == HTTPStatus.NOT_FOUND else self._good(status, value)

    def delete(self, key: str) -> None:
        self._ask("DELETE", f"/key/{quote(key)}")

    def gather(self, key: str, rank: int, size: int, value: Any, timeout: float) -> list[Any]:
        """Give `value` (anything JSON can say) and get those of all ranks, in order.

        When they are not complete `timeout` seconds after this call, everyone gets `RanksMissing`.
        """
        status, answer = self._gather(key, rank, size, value, timeout)
        if status == HTTPStatus.REQUEST_TIMEOUT:
            failure = json.loads(answer)
            raise RanksMissing(
                f"{_ranks(failure['missing'])} did not come to {key!r} within {failure['waited']:.3g} s; "
                f"{_ranks(map(int, failure['came']))} did. Look at the log of the missing for the cause."
            )
        everything: list[Any] = json.loads(self._good(status, answer))
        return everything

    def beat(self, role: str, rank: int, step: int, operation: str, moves: int, paused: bool) -> None:
        """Say where this process is. Any change from its last report, also in `moves`, counts as progress."""
        report = {"role": role, "rank": rank, "step": step, "operation": operation}
        self._ask("POST", "/beat", json.dumps(report | {"moves": moves, "paused": paused}).encode())

    def leave(self, role: str, rank: int, how: str = LEFT) -> None:
        """Say that no more heartbeats are to be expected."""
        self._ask("DELETE", f"/beat/{quote(f'{role} {rank}')}", how.encode())

    def close(self) -> None:
        """Close the connections of all threads; a later call opens a new one."""
        with self._guard:
            wires, self._all, self._mine = self._all, set(), threading.local()
        for wire in wires:
            wire.close()

    def _gather(self, key: str, rank: int, size: int, value: Any, timeout: float) -> Answer:
        body = {"rank": rank, "size": size, "value": value, "timeout": timeout}
        return self._call("POST", f"/gather/{quote(key)}", json.dumps(body).encode(), timeout)

    def _ask(self, method: str, path: str, body: bytes = b"") -> None:
        self._good(*self._call(method, path, body))

    def _good(self, status: int, answer: bytes) -> bytes:
        if status == HTTPStatus.OK:
            return answer
        if status == HTTPStatus.UNAUTHORIZED:
            raise CommunicationError(
                f"the control plane at {self.url} refused this process's token: it belongs to another job. "
                "Unset UNIDIST_CONTROL and UNIDIST_TOKEN, or start with `unidist run`."
            )
        why = answer.decode(errors="replace")
        if status == HTTPStatus.CONFLICT:
            raise RanksDisagree(why)
        raise CommunicationError(f"the control plane at {self.url} answered {status}: {why}")

    def _call(self, method: str, path: str, body: bytes, wait: float = 0.0) -> Answer:
        if len(body) > MAX_BODY:
            raise UsageError(f"the control plane takes {MAX_BODY} bytes at a time, not {len(body)}")
        head = f"{method} {path} HTTP/1.1\r\n{self._common}Content-Length: {len(body)}\r\n\r\n"
        try:
            wire = self._wire()
            wire.settimeout(self.timeout + wait)
            wire.sendall(head.encode() + body)  # in one packet, which http.client's own request() does not do
            with HTTPResponse(wire, method=method) as response:
                response.begin()
                answer = response.status, response.read()
            if response.will_close:
                self._drop()
            return answer
        except (OSError, HTTPException) as error:
            self._drop()
            raise CommunicationError(
                f"the control plane at {self.url} does not answer ({error or type(error).__name__}): "
                "the launcher or rank 0 that ran it has ended, or cannot be reached from this host"
            ) from error

    def _wire(self) -> socket.socket:
        wire: socket.socket | None = getattr(self._mine, "wire", None)
        if wire is None:
            wire = socket.create_connection(self._address, self.timeout)
            wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._mine.wire = wire
            with self._guard:
                self._all.add(wire)
        return wire

    def _drop(self) -> None:
        wire: socket.socket | None = getattr(self._mine, "wire", None)
        self._mine.wire = None
        if wire is not None:
            wire.close()
            with self._guard:
                self._all.discard(wire)


def connect_from_env(env: Mapping[str, str] | None = None) -> Control | None:
    """The control plane of `unidist run`, if that started us."""
    env = os.environ if env is None else env
    url, token = env.get("UNIDIST_CONTROL"), env.get("UNIDIST_TOKEN")
    if not url:
        return None
    if not token:
        raise WorldError(
            f"UNIDIST_CONTROL is {url!r}, but UNIDIST_TOKEN is not set: set both, as `unidist run`, or none"
        )
    return Control(url, token)


# -- its first users -----------------------------------------------------------------------------------------


def agree(control: Control, sequence: int, rank: int, size: int, signature: str, timeout: float) -> None:
    """Return when all ranks have come to their collective number `sequence` with the same `signature`.

    Raises on every rank: `RanksDisagree` saying who wanted what, or `RanksMissing` saying who did not come.
    """
    status, answer = control._gather(f"agree/{sequence}", rank, size, signature, timeout)
    if status == HTTPStatus.REQUEST_TIMEOUT:
        failure = json.loads(answer)
        came = {int(r): wish for r, wish in failure["came"].items()}
        raise RanksMissing(
            f"{_ranks(failure['missing'])} did not come to collective {sequence} within {failure['waited']:.3g} s, "
            f"where others wait ({_wishes(came)}). All ranks must make the same calls in the same order: "
            "look for a rank that died or is slow, or a call under `if strategy.is_main`."
        )
    wishes = json.loads(control._good(status, answer))
    if any(wish != signature for wish in wishes):
        raise RanksDisagree(
            f"the ranks want different things in collective {sequence}: {_wishes(dict(enumerate(wishes)))}"
        )


class Heart:
    """Tells the control server where this process is, every `interval` seconds, from a thread of its own.

    The main thread only stores an attribute. A server that went away does not end the training.
    """

    def __init__(self, control: Control, rank: int, role: str = "worker", interval: float = 1.0) -> None:
        self._control, self._rank, self._role, self._interval = control, rank, role, interval
        self._at = ("start-up", 0, 0)  # operation, step, how often we were told
        self._pauses = 0
        self._how = LEFT
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="unidist-heart", daemon=True)

    def start(self) -> Heart:
        self._thread.start()
        return self

    def stop(self, how: str = LEFT) -> None:
        self._how = how
        self._stop.set()
        # A server that hangs may keep the thread in its last call; it is a daemon, and may be left behind.
        self._thread.join(timeout=2)

    def __enter__(self) -> Heart:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def at(self, operation: str, step: int) -> None:
        self._at = (operation, step, self._at[2] + 1)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """For a stretch in which no progress is to be expected, such as waiting for another rank."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    def _beat(self) -> None:
        while True:
            operation, step, moves = self._at
            with contextlib.suppress(CommunicationError):  # the next may get through again
                self._control.beat(self._role, self._rank, step, operation, moves, self._pauses > 0)
            if self._stop.wait(self._interval):
                break
        with contextlib.suppress(CommunicationError):
            self._control.leave(self._role, self._rank, self._how)


def _ranks(ranks: Iterable[int]) -> str:
    """ "rank 1", "ranks 0, 2", "ranks 0-6, 9"."""
    ordered = sorted(ranks)
    spans: list[list[int]] = []
    for rank in ordered:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    parts = [f"{s[0]}-{s[-1]}" if len(s) > 2 else ", ".join(map(str, s)) for s in spans]
    return f"rank{'s' if len(ordered) != 1 else ''} {', '.join(parts) or 'none'}"


def _wishes(wishes: Mapping[int, str]) -> str:
    groups: dict[str, list[int]] = defaultdict(list)
    for rank, wish in sorted(wishes.items()):
        groups[wish].append(rank)
    return "; ".join(f"{_ranks(ranks)}: {wish}" for wish, ranks in groups.items())

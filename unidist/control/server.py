"""The control server: one thread and one selector for all connections, and bounds on what a stranger can cost.

It runs beside the launcher; where something else launched the job, in a process of its own beside rank 0 (see `host`).
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import selectors
import socket
import threading
import time
from collections.abc import Callable
from functools import partial

from unidist.control import protocol
from unidist.control.causes import Beat, Cause
from unidist.control.connection import Admission, Connection
from unidist.control.protocol import Header, bind
from unidist.control.requests import Requests
from unidist.control.timers import Timers

HANDSHAKE = 5.0  # seconds in all for a connection to prove itself, however slowly it drips
STRANGERS = 256  # connections that have not proven themselves; more push out the oldest
LEAST_STAY = 0.2  # seconds that even the oldest is given, so that a crowd of thousands has passed in two or three
UNREAD = 64 * 2**20  # bytes that may wait for a peer that does not read


class ControlServer:
    """The service. Binds at once (port 0: a free one), answers after `start()`, or inside `with`."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        *,
        listeners: list[socket.socket] | None = None,
        job: str = "",
        generation: int = 1,
    ) -> None:
        self.token = protocol.challenge() if token is None else token
        self._admission = Admission(self.token, job, generation)
        self._listeners = listeners or [bind(host, port)]
        self.host, self.port = host, int(self._listeners[0].getsockname()[1])
        self._timers = Timers()
        self._guard = threading.RLock()  # callers of other threads against the loop
        self._requests = Requests(self._timers.later, self._push)
        self._connections: dict[int, Connection] = {}
        self._strangers: dict[int, Connection] = {}  # oldest first
        self._numbers = itertools.count()
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, self._woken)
        self._listening = self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return protocol.url(self.host, self.port)

    def start(self) -> ControlServer:
        if self._thread is None:
            self._thread = threading.Thread(target=self.serve, name="unidist-control-server", daemon=True)
            self._thread.start()
        return self

    def serve(self, until: Callable[[], bool] = lambda: False) -> None:
        """The loop: until `close`, or until what is asked after every round."""
        self._listen(True)
        while not self._closing and not until():
            with self._guard:
                wait = self._timers.run()
            for key, _ in self._selector.select(wait):
                with self._guard:
                    key.data()
        with self._guard:
            self._end()

    def close(self) -> None:
        """End waits, send what is complete, close everything."""
        self._closing = True
        if self._thread is not None:
            with contextlib.suppress(OSError):
                self._wake.send(b"x")
            self._thread.join()
            self._thread = None
        else:
            self._end()

    def __enter__(self) -> ControlServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def put(self, key: str, value: bytes) -> None:
        with self._guard:
            self._requests.values.put(key, value)

    def get(self, key: str) -> bytes | None:
        with self._guard:
            return self._requests.values.peek(key)

    def beats(self) -> dict[str, Beat]:
        """Every process that was ever heard of, by "role rank"; those that left (LEFT, GAVE_UP) are paused for good."""
        with self._guard:
            return self._requests.roll.pulses.beats()

    def causes(self) -> list[Cause]:
        """What failed, as it was told, the first cause first."""
        with self._guard:
            return self._requests.roll.reports()

    def verdict(self) -> Cause | None:
        """The first cause, once it is certain that the job cannot go on."""
        with self._guard:
            return self._requests.roll.first

    def worker_ended(self, rank: int, host: str) -> None:
        """Its launcher has seen it: those who wait for it at a meeting are told."""
        with self._guard:
            self._requests.gatherings.end(rank, host)

    @property
    def peers(self) -> int:
        """Connections that have proven themselves."""
        with self._guard:
            return len(self._connections) - len(self._strangers)

    def stop_listening(self) -> None:
        """Nobody else is expected: the port is free for others, the connections stay."""
        with self._guard:
            self._listen(False)
            for listener in self._listeners:
                listener.close()
            self._listeners = []

    # -- for a process that only serves ------------------------------------------------------------------------

    @property
    def failed(self) -> bool:
        return self._requests.roll.first is not None

    @property
    def refused(self) -> bool:
        """Whether a meeting did not come about, and each who comes to it is told why."""
        return not self.met and self._requests.gatherings.refused and not self._requests.superseded

    @property
    def met(self) -> bool:
        """Whether all ranks have met here."""
        return self._requests.roll.met

    def watch(self, wire: socket.socket, ready: Callable[[], None]) -> None:
        self._selector.register(wire, selectors.EVENT_READ, ready)

    def forget(self, wire: socket.socket) -> None:
        self._selector.unregister(wire)

    def later(self, after: float, call: Callable[[], None]) -> None:
        self._timers.later(after, call)

    def listen_too(self, addresses: list[str], port: int) -> None:
        """On these as well, as far as the port is free there."""
        was = self._listening
        self._listen(False)
        for address in addresses:
            with contextlib.suppress(OSError):
                self._listeners.append(bind(address, port))
        self._listen(was)

    # -- the loop ----------------------------------------------------------------------------------------------

    def _listen(self, on: bool) -> None:
        if on != self._listening and not self._closing:
            for listener in self._listeners:
                if on:
                    listener.setblocking(False)
                    self._selector.register(listener, selectors.EVENT_READ, partial(self._accept, listener))
                else:
                    self._selector.unregister(listener)
            self._listening = on

    def _woken(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_reader.recv(64)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(16):
            if len(self._strangers) >= STRANGERS and not self._push_out():
                return
            try:
                wire, _ = listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    if self._strangers:
                        self._drop(next(iter(self._strangers.values())))
                    self._pause()
                return
            wire.setblocking(False)
            protocol.tune(wire)
            one = Connection(next(self._numbers), wire, self._send)
            self._connections[one.number] = self._strangers[one.number] = one
            self._selector.register(wire, selectors.EVENT_READ, partial(self._ready, one))
            self._timers.later(HANDSHAKE, partial(self._too_slow, one))
            one.greet()

    def _push_out(self) -> bool:
        """Make room for another stranger. Ranks that come by the hundred have time to answer; then the oldest goes."""
        oldest = next(iter(self._strangers.values()))
        age = time.monotonic() - oldest.since
        if age < LEAST_STAY:
            self._pause(LEAST_STAY - age)
            return False
        self._drop(oldest)
        return True

    def _pause(self, seconds: float = 0.1) -> None:
        if self._listening:
            self._listen(False)
            self._timers.later(seconds, lambda: self._listen(True))

    def _too_slow(self, one: Connection) -> None:
        if one.number in self._strangers:
            self._drop(one)

    def _ready(self, one: Connection) -> None:
        """Something can be read, or more can be sent."""
        if one.number not in self._connections:
            return
        if one.unsent:
            self._flush(one)
        try:
            data = one.wire.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data or one.ends:
            return self._drop(one)
        one.frames.feed(data)
        try:
            for header, body in one.frames:
                if one.trusted:
                    self._requests.answer(one, header, body)
                else:
                    self._greet(one, header)
                if one.ends or one.number not in self._connections:
                    break
        except Exception:  # whatever it sent that nobody has thought of: this connection ends, and nothing else
            self._drop(one)

    def _greet(self, one: Connection, hello: Header) -> None:
        answer = self._admission.answer(one.challenge, hello, self.peers)
        if "refused" in answer:
            one.send(answer)
            one.ends = True
            if not one.unsent:
                self._drop(one)
            return
        one.frames.trusted = True
        one.host = str(hello.get("host", "?"))[:200]
        self._strangers.pop(one.number, None)
        if not self._listening and self._listeners:
            self._listen(True)
        one.send({**answer, "number": one.number, "seen": one.seen, "reached": one.reached})

    def _push(self, header: Header) -> None:
        for one in list(self._connections.values()):
            if one.trusted:
                one.send(header)

    # -- one connection ----------------------------------------------------------------------------------------

    def _send(self, one: Connection, data: bytes) -> None:
        if one.number in self._connections:
            one.unsent += data
            if len(one.unsent) > UNREAD + protocol.MAX_BODY:
                return self._drop(one)
            self._flush(one)

    def _flush(self, one: Connection) -> None:
        try:
            sent = one.wire.send(one.unsent)
            del one.unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:
            return self._drop(one)
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if one.unsent else 0)
        key = self._selector.get_key(one.wire)
        if key.events != wanted:
            self._selector.modify(one.wire, wanted, key.data)
        if one.ends and not one.unsent:
            self._drop(one)

    def _drop(self, one: Connection) -> None:
        if self._connections.pop(one.number, None) is None:
            return
        self._strangers.pop(one.number, None)
        self._selector.unregister(one.wire)
        one.wire.close()
        if not self._closing:
            self._requests.lost(one)

    def _end(self) -> None:
        self._closing = True
        self._requests.close()
        until = time.monotonic() + 2.0
        for one in list(self._connections.values()):
            with contextlib.suppress(OSError):
                one.wire.settimeout(max(0.0, until - time.monotonic()))
                one.wire.sendall(one.unsent)
            one.wire.close()
        self._connections.clear()
        self._strangers.clear()
        for listener in self._listeners:
            listener.close()
        self._selector.close()
        self._wake.close()
        self._wake_reader.close()

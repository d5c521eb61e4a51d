"""A process's side of the control plane: requests from any thread, over one connection that one thread reads."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import queue
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from unidist.control import protocol
from unidist.control.agreement import gather_error, ungathered
from unidist.control.causes import LEFT, Cause
from unidist.control.protocol import MAX_BODY, BadInput, Frames, Header
from unidist.errors import CommunicationError, UsageError

Answer = tuple[Header, bytes]

MAX_OPERATION = 500  # characters of a heartbeat's operation


class NotOurs(CommunicationError):
    """Who answers there is not the control plane of this job; `code` says how we know."""

    def __init__(self, code: str, why: str) -> None:
        super().__init__(why)
        self.code = code


class Control:
    """Safe to share between threads. It connects with the first request; a lost connection is not made again.

    Nothing is retried: a request that fails raises `CommunicationError`.
    """

    def __init__(
        self, url: str, token: str, timeout: float = 30.0, *, job: str = "", generation: int = 1, host: str = ""
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme != "tcp" or not parts.hostname or not parts.port:
            raise UsageError(f"the control plane's address is {url!r}; expected tcp://host:port")
        self.url = url
        self.timeout = timeout
        self._address = (parts.hostname, parts.port)
        self._token, self.host = token, host or socket.gethostname()
        self._hello: Header = {"job": job, "generation": generation, "host": self.host}
        self.settings = {"url": url, "token": token, **self._hello}  # for another connection, of another process
        self._numbers = itertools.count(1)
        self._guard = threading.Lock()
        self._sending = threading.Lock()
        self._wire: socket.socket | None = None
        self._reader: threading.Thread | None = None
        self._pending: dict[int, queue.SimpleQueue[Answer | None]] = {}
        self._lost: str | None = None  # why, once the connection is gone
        self._closed = False
        self.number = -1  # of the connection, as the server counts them
        self.seen = self.reached = ""  # our address as the server sees it, and its own as we reached it
        self.on_push: Callable[[Header], None] = lambda header: None
        self.on_loss: Callable[[str], None] = lambda why: None

    def again(self) -> Control:
        """Another connection to the same server, not yet made: for a process that was forked from this one."""
        return Control(self.url, self._token, self.timeout, **self._hello)

    # -- values ------------------------------------------------------------------------------------------------

    def put(self, key: str, value: bytes) -> None:
        self.ask("put", value, key=key)

    def get(self, key: str, wait: float = 0.0) -> bytes | None:
        """The value, or None when it is not there, nor came within `wait` seconds."""
        return self.get_all([key], wait)[0]

    def get_all(self, keys: list[str], wait: float = 0.0) -> list[bytes | None]:
        header, body = self.ask("get", keys=keys, wait=wait, patience=wait)
        values: list[bytes | None] = []
        for size in header["sizes"]:
            values.append(None if size < 0 else body[:size])
            body = body[max(0, size) :]
        return values

    def delete(self, key: str) -> bool:
        return bool(self.ask("delete", key=key)[0]["deleted"])

    def add(self, key: str, amount: int) -> int:
        return int(self.ask("add", key=key, amount=amount)[0]["total"])

    def append(self, key: str, value: bytes) -> None:
        self.ask("append", value, key=key)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        return self.ask("compare_set", desired, key=key, expected=base64.b64encode(expected).decode())[1]

    def held(self, keys: list[str]) -> bool:
        """Whether all of them are there."""
        return bool(self.ask("held", keys=keys)[0]["held"])

    def count(self, prefix: str) -> int:
        return int(self.ask("count", key=prefix)[0]["count"])

    # -- all ranks ---------------------------------------------------------------------------------------------

    def gather(self, key: str, rank: int, size: int, value: Any, timeout: float) -> list[Any]:
        """Give `value` (anything JSON can say) and get those of all ranks, in order.

        When they are not complete `timeout` seconds after this call, everyone gets `RanksMissing`.
        """
        return [json.loads(body) for body in self.gather_bytes(key, rank, size, json.dumps(value).encode(), timeout)]

    def gather_bytes(self, key: str, rank: int, size: int, value: bytes, timeout: float) -> list[bytes]:
        try:
            header, body = self.ask("gather", value, key=key, rank=rank, size=size, wait=timeout, patience=timeout)
        except KeyboardInterrupt:
            self.tell("withdraw", key=key)  # else what we said would be paired with what others say to another question
            raise
        if "error" in header:
            raise gather_error(header, repr(key))
        return ungathered(header, body)

    def beat(self, role: str, rank: int, step: int, operation: str, moves: int, paused: bool, **more: Any) -> None:
        """Say where this process is. Any change from its last report, also in `moves`, counts as progress."""
        operation = operation[:MAX_OPERATION]
        said: dict[str, Any] = {"role": role, "rank": rank, "step": step, "moves": moves, "paused": paused}
        self.ask("beat", operation=operation, **said, **more)

    def leave(self, role: str, rank: int, how: str = LEFT) -> None:
        """Say that no more heartbeats are to be expected."""
        self.ask("leave", name=f"{role} {rank}", how=how)

    # -- the connection ----------------------------------------------------------------------------------------

    def connect(self, within: float | None = None) -> Control:
        """Connect now, rather than with the first request. Raises OSError, or NotOurs when another answers there."""
        with self._guard:
            if self._wire is None and self._lost is None and not self._closed:
                self._wire = self._shake_hands(self.timeout if within is None else within)
                self._reader = threading.Thread(
                    target=self._read, args=(self._wire,), name="unidist-control", daemon=True
                )
                self._reader.start()
                _OPEN.add(self)
        return self

    def ask(self, op: str, body: bytes = b"", *, patience: float = 0.0, **header: Any) -> Answer:
        """One request and its answer, which may be an error that the caller knows how to say."""
        if len(body) > MAX_BODY:
            raise UsageError(f"the control plane takes {MAX_BODY} bytes at a time, not {len(body)}")
        number = next(self._numbers)
        answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        try:
            self.connect()
            self._pending[number] = answers
            if self._lost is not None:  # looked at after we are known to wait: else nobody would tell us
                raise OSError(self._lost)
            self._send(protocol.pack({"id": number, "op": op, **header}, body))
            answer = answers.get(timeout=self.timeout + patience)
        except queue.Empty:
            raise self._silent(f"no answer within {self.timeout + patience:g} s") from None
        except OSError as error:
            raise self._silent(str(error) or type(error).__name__) from error
        finally:
            self._pending.pop(number, None)
        if answer is None:
            raise self._silent(self._lost or "closed")
        if answer[0].get("error") == "refused":
            raise CommunicationError(f"the control plane at {self.url} refused {op}: {answer[0].get('why')}")
        if answer[0].get("error") == "closing":
            raise CommunicationError(f"the control plane at {self.url} is closing")
        return answer

    def tell(self, op: str, **header: Any) -> None:
        """A message that needs no answer."""
        try:
            self.connect()
            self._send(protocol.pack({"op": op, **header}))
        except OSError as error:
            raise self._silent(str(error) or type(error).__name__) from error

    def close(self) -> None:
        """Close the connection and end its thread."""
        self._closed = True
        with self._guard:
            wire, reader = self._wire, self._reader
        if wire is not None:
            with contextlib.suppress(OSError):
                wire.shutdown(socket.SHUT_RDWR)
        if reader is not None and reader is not threading.current_thread():
            reader.join(timeout=5)
        if wire is not None:
            wire.close()
        _OPEN.discard(self)

    def forget(self) -> None:
        """In a forked child: the connection is the parent's. Kept open here, it would hide the parent's death."""
        wire, self._wire, self._closed, self._lost = self._wire, None, True, "this is a forked process"
        if wire is not None:
            wire.close()

    def _send(self, data: bytes) -> None:
        with self._sending:
            if self._wire is None:
                raise OSError(self._lost or "closed")
            self._wire.sendall(data)

    def _silent(self, why: str) -> CommunicationError:
        return CommunicationError(
            f"the control plane at {self.url} does not answer ({why}): "
            "the launcher or rank 0 that ran it has ended, or cannot be reached from this host"
        )

    def _shake_hands(self, within: float) -> socket.socket:
        until = time.monotonic() + within
        wire = socket.create_connection(self._address, within)
        try:
            protocol.tune(wire)
            frames = Frames()
            challenge = str(_next_frame(wire, frames, until).get("challenge"))
            nonce = protocol.challenge()
            proof = protocol.proof(self._token, "client", challenge, nonce)
            wire.sendall(protocol.MAGIC + protocol.pack({"nonce": nonce, "proof": proof, **self._hello}))
            answer = _next_frame(wire, frames, until)
            if answer.get("refused") == "secret":
                raise NotOurs(
                    "secret",
                    f"the control plane at {self.url} refused this process's token: it belongs to "
                    "another job. Unset UNIDIST_CONTROL and UNIDIST_TOKEN, or start with `unidist run`.",
                )
            given = answer.get("welcome", answer.get("proof"))
            if not protocol.proves(given, self._token, "server", challenge, nonce):
                raise NotOurs("secret", f"who answers at {self.url} does not know this job's secret")
            if "refused" in answer:
                raise NotOurs(str(answer["refused"]), f"{self.url}: {answer.get('why')}")
            self.number = int(answer.get("number", -1))
            self.seen, self.reached = str(answer.get("seen", "")), str(answer.get("reached", ""))
            wire.settimeout(None)
            self._frames = frames
            frames.trusted = True
            return wire
        except BaseException:
            wire.close()
            raise

    def _read(self, wire: socket.socket) -> None:
        why = "it closed the connection"
        try:
            while data := wire.recv(1 << 18):
                self._frames.feed(data)
                for header, body in self._frames:
                    waiting = self._pending.get(header.get("id", 0))
                    if waiting is not None:
                        waiting.put((header, body))
                    elif "push" in header:
                        self.on_push(header)
        except (OSError, BadInput) as error:
            why = str(error)
        self._lost = "closed" if self._closed else why
        for waiting in list(self._pending.values()):
            waiting.put(None)
        if not self._closed:
            self.on_loss(why)


_OPEN: weakref.WeakSet[Control] = weakref.WeakSet()


def _forget_in_child() -> None:
    for control in list(_OPEN):
        control.forget()


os.register_at_fork(after_in_child=_forget_in_child)


def _next_frame(wire: socket.socket, frames: Frames, until: float) -> Header:
    try:
        while True:
            for header, _ in frames:
                return header
            wire.settimeout(max(0.01, until - time.monotonic()))
            data = wire.recv(4096)
            if not data:
                raise NotOurs("closed", "it closes the connection")
            frames.feed(data)
    except TimeoutError:
        raise NotOurs("silent", "it accepts connections and says nothing") from None
    except BadInput as error:
        raise NotOurs("foreign", str(error)) from None


def first_cause(answer: Answer) -> Cause | None:
    told = answer[0].get("first")
    return None if told is None else Cause.from_data(told)

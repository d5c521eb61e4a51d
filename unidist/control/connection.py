"""One accepted connection of the control server, and who is let in."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from unidist.control import protocol
from unidist.control.protocol import Frames, Header

PEERS = 2**14  # processes that may be connected at a time


class Connection:
    """Its bytes leave by `transmit`, which belongs to the server."""

    def __init__(self, number: int, wire: socket.socket, transmit: Callable[[Connection, bytes], None]) -> None:
        self.number, self.wire, self._transmit = number, wire, transmit
        self.since = time.monotonic()
        self.frames = Frames()
        self.challenge = protocol.challenge()
        self.unsent = bytearray()
        self.ends = False  # when all is sent
        self.host = "?"
        self.waits: dict[str, int] = {}  # gatherings it waits in, by key: its rank there

    @property
    def trusted(self) -> bool:
        return self.frames.trusted

    @property
    def seen(self) -> str:
        """Its address."""
        return _address(self.wire.getpeername())

    @property
    def reached(self) -> str:
        """Ours, as it has reached us."""
        return _address(self.wire.getsockname())

    def greet(self) -> None:
        self._transmit(self, protocol.MAGIC + protocol.pack({"challenge": self.challenge}))

    def send(self, header: Mapping[str, Any], body: bytes = b"") -> None:
        self._transmit(self, protocol.pack(header, body))


class Admission(NamedTuple):
    """Who may connect: those who know the secret, and are of this job and this Strategy of it."""

    secret: str
    job: str
    generation: int

    def answer(self, challenge: str, hello: Header, peers: int) -> Header:
        """A welcome, or why not. Both prove that we know the secret, but to those only who have proven it."""
        nonce = hello.get("nonce")
        if not protocol.proves(hello.get("proof"), self.secret, "client", challenge, nonce):
            return {"refused": "secret", "why": "the secret is not this job's"}
        ours = protocol.proof(self.secret, "server", challenge, str(nonce))
        if hello.get("job", "") != self.job:
            return {"refused": "job", "why": f"this is the meeting of job {self.job!r}", "proof": ours}
        if self.job and hello.get("generation", 1) != self.generation:
            return {"refused": "generation", "why": f"this is Strategy number {self.generation}", "proof": ours}
        if peers >= PEERS:
            return {"refused": "full", "why": f"{PEERS} processes are connected already", "proof": ours}
        return {"welcome": ours}


def _address(name: Any) -> str:
    return str(name[0]).removeprefix("::ffff:") if isinstance(name, tuple) else ""

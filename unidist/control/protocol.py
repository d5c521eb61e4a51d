"""The wire format of the control plane: framed messages over TCP, and how both sides prove that they know the secret.

    server -> client   MAGIC, then a frame {"challenge"}
    client -> server   MAGIC, then a frame {"nonce", "proof", "job", "generation", "name", "host"}
    server -> client   a frame {"welcome": proof, "number", "seen", "reached"}, or {"refused", "why"} and the end
    afterwards         requests and answers, matched by "id", and pushes from the server

A frame is two lengths, a header in JSON and raw bytes. The secret itself never travels. What follows the handshake is
neither encrypted nor signed: the protocol keeps strangers out who can connect, not those who can rewrite packets.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from typing import Any

MAGIC = b"unidist\x02"
LENGTHS = struct.Struct("!II")

MAX_BODY = 16 * 2**20  # of one message
MAX_HEADER = 2**20
MAX_HELLO = 4096  # of everything that is said before the proof
BACKLOG = 4096  # connections that wait to be accepted
VANISHED = 10  # seconds without a sign of life of another host's kernel

Header = dict[str, Any]


class BadInput(Exception):
    """What came is not this protocol, or exceeds its bounds: the connection is closed."""


def pack(header: Mapping[str, Any], body: bytes = b"") -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    return LENGTHS.pack(len(text), len(body)) + text + body


class Frames:
    """Turns the bytes of a connection into frames. Bounds are checked on the lengths, before anything is stored."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._magic = False
        self.trusted = False

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def __iter__(self) -> Iterator[tuple[Header, bytes]]:
        """The frames that are complete."""
        if not self._magic:
            if not MAGIC.startswith(bytes(self._buffer[: len(MAGIC)])):
                raise BadInput("it does not speak unidist's protocol")
            if len(self._buffer) < len(MAGIC):
                return
            del self._buffer[: len(MAGIC)]
            self._magic = True
        while len(self._buffer) >= LENGTHS.size:
            head, body = LENGTHS.unpack_from(self._buffer)
            most = (MAX_HEADER, MAX_BODY) if self.trusted else (MAX_HELLO, 0)
            if head > most[0] or body > most[1]:
                raise BadInput(f"a message of {head} and {body} bytes, at most {most[0]} and {most[1]} are allowed")
            end = LENGTHS.size + head + body
            if len(self._buffer) < end:
                return
            with memoryview(self._buffer) as view:
                text, raw = bytes(view[LENGTHS.size : LENGTHS.size + head]), bytes(view[end - body : end])
            del self._buffer[:end]
            yield _header(text), raw


def _header(text: bytes) -> Header:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"a header that is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise BadInput("a header that is not an object")
    return header


# -- the proofs ------------------------------------------------------------------------------------------------------


def challenge() -> str:
    return os.urandom(16).hex()


def proof(secret: str, side: str, challenge: str, nonce: str) -> str:
    """What only one who knows the secret can say, for this connection and this side of it."""
    said = f"unidist {side}\0{challenge}\0{nonce}".encode(errors="backslashreplace")  # JSON can say half a character
    return hmac.new(secret.encode(), said, hashlib.sha256).hexdigest()


def proves(given: object, secret: str, side: str, challenge: str, nonce: object) -> bool:
    if not isinstance(given, str) or not isinstance(nonce, str) or not given.isascii():
        return False
    return hmac.compare_digest(given, proof(secret, side, challenge, nonce))


# -- sockets ---------------------------------------------------------------------------------------------------------


def tune(wire: socket.socket) -> None:
    """Small messages leave at once, and a host that vanished is noticed within VANISHED seconds.

    The kernel looks, and answers for a process that is stopped, or whose interpreter is busy.
    """
    with contextlib.suppress(OSError):
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if sys.platform != "linux" or wire.getpeername()[0] == wire.getsockname()[0]:
            return  # between processes of one host there is no cable
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_KEEPIDLE, 3),
            (socket.TCP_KEEPINTVL, 2),
            (socket.TCP_USER_TIMEOUT, 1000 * VANISHED),  # decides in place of the number of probes, too
        ):
            wire.setsockopt(socket.IPPROTO_TCP, option, value)


def url(host: str, port: int) -> str:
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port}"


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; `host` "" means every interface."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener

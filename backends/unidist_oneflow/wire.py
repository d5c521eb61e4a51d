"""Lines of JSON over TCP: what the ranks tell each other before and beside OneFlow."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

LONGEST = 1 << 20


class Wire:
    """One connection. `receive` gives whole messages; None is the end of the connection."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self._pending = b""
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
            with contextlib.suppress(OSError, AttributeError):  # a host that vanished is noticed within 10 s
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """A peer that is gone is noticed when receiving, not here."""
        with contextlib.suppress(OSError):
            self.socket.settimeout(5.0)
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout: float | None) -> dict[str, Any] | None:
        """The next message. Raises TimeoutError, and ValueError when it is not one of ours."""
        while b"\n" not in self._pending:
            if len(self._pending) > LONGEST:
                raise ValueError("too long for a message")
            self.socket.settimeout(timeout)
            try:
                data = self.socket.recv(1 << 16)
            except TimeoutError:
                raise
            except OSError:
                return None
            if not data:
                return None
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError("not a message")
        return message

    def closes_within(self, seconds: float) -> bool:
        """Whether the other side hangs up, having said nothing, in so short a time."""
        self.socket.settimeout(seconds)
        try:
            return not self.socket.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return False
        except OSError:
            return True

    @property
    def peer(self) -> str:
        """The address of the other side."""
        return str(self.socket.getpeername()[0])

    @property
    def has_more(self) -> bool:
        return b"\n" in self._pending

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()

"""Free ports of this machine, kept until the job is over, and who holds one that is not free."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
from pathlib import Path

from unidist.errors import LaunchError
from unidist.launch import processes as system

TIME_WAIT = "06"  # in /proc/net/tcp


class Ports:
    """Reserves ports on `host`. A context: leaving it gives them back.

    They lie below the range that the kernel hands to outgoing connections, and stay bound (not listening) here: a
    process that sets SO_REUSEADDR, as every framework's server does, can listen on them, and another `unidist run`
    sees them taken.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host
        self._held: list[socket.socket] = []

    def __enter__(self) -> Ports:
        return self

    def __exit__(self, *_: object) -> None:
        for held in self._held:
            held.close()
        self._held.clear()

    def take(self, count: int) -> tuple[int, ...]:
        """`count` free ports, ascending."""
        top = _first_ephemeral()
        candidates = range(max(1024, top - 16384), top)
        taken: list[int] = []
        first = random.choice(candidates)
        for port in (*range(first, candidates.stop), *range(candidates.start, first)):
            if len(taken) == count:
                break
            with contextlib.suppress(OSError):
                self._hold(port)
                taken.append(port)
        if len(taken) == count:
            return tuple(sorted(taken))
        raise LaunchError(f"no {count} free ports between {candidates.start} and {candidates.stop} on {self._host}")

    def fixed(self, port: int) -> int:
        """The port that the user named, or an error that says who has it."""
        try:
            self._hold(port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and _only_closing(port):
                with contextlib.suppress(OSError):
                    self._hold(port, at_once=True)
                    return port
            who = f": {holder(port)}" if error.errno == errno.EADDRINUSE else ""
            raise LaunchError(
                f"port {port} cannot be used on {self._host} ({error.strerror}){who}. "
                "Choose another with --master-port, or leave it out and a free one is found."
            ) from None
        return port

    def _hold(self, port: int, at_once: bool = False) -> None:
        """`at_once`: also while connections of an earlier job are still closing."""
        # A bound socket shows in no table of the kernel's. So that other launchers see it there is a name, too, which
        # goes with this process.
        name = socket.socket(socket.AF_UNIX)
        held = socket.socket()
        try:
            name.bind(f"\0unidist-port-{port}")
            if at_once:
                held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind((self._host, port))
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        except BaseException:
            held.close()
            name.close()
            raise
        self._held += [held, name]


def _rows(port: int) -> list[list[str]]:
    """What the kernel's tables say about sockets that are bound to this port (and listen or are connected)."""
    rows = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            rows += [row.split() for row in Path(table).read_text().splitlines()[1:]]
    return [row for row in rows if int(row[1].rpartition(":")[2], 16) == port]


def _only_closing(port: int) -> bool:
    rows = _rows(port)
    return bool(rows) and all(row[3] == TIME_WAIT for row in rows)


def holder(port: int) -> str:
    """Who has this port, as well as /proc tells."""
    inodes = {f"socket:[{row[9]}]" for row in _rows(port) if row[9] != "0"}
    for pid in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        with contextlib.suppress(OSError):
            if inodes & {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}:
                return f"process {pid} has it ({system.command(int(pid))})"
    return "another user's process has it" if inodes else "another `unidist run` may keep it for its job"


def _first_ephemeral() -> int:
    with contextlib.suppress(OSError, ValueError):
        return max(2048, int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]))
    return 32768

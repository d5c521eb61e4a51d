"""The control server beside rank 0, where no launcher of ours has one: a process of its own.

A thread of rank 0 would stand still whenever its engine holds the interpreter's lock, as OneFlow does while it waits
for the other ranks, and could not tell them when rank 0 itself is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from pathlib import Path

# What the packages import for users is left out: every rank waits for this process to start.
PROGRAM = """
import sys, types
for name, folder in (("unidist", {folder!r}), ("unidist.control", {folder!r} + "/control")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
from unidist.control.host_process import main
main()
"""


class Host:
    """A running server. `release` frees its port; `close` lets it end as soon as all others have left."""

    def __init__(self, listeners: list[socket.socket], secret: str, job: str, generation: int, widen: bool) -> None:
        self._line, theirs = socket.socketpair()
        fds = [listener.fileno() for listener in listeners]
        code = PROGRAM.format(folder=str(Path(__file__).resolve().parents[1]))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", code, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), *fds],
                start_new_session=True,  # it has to outlive a signal to our group by a moment
                cwd="/",
            )
        settings = {"fds": fds, "secret": secret, "job": job, "generation": generation, "widen": widen}
        self._line.sendall(json.dumps(settings).encode() + b"\n")
        for listener in listeners:
            listener.close()
        _hosts.add(self)

    def forget(self) -> None:
        """In a forked child: only rank 0 itself shall keep the server."""
        self._line.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def release(self) -> None:
        """Nobody else is expected: when this returns, the port can be bound by others. The connections stay."""
        with contextlib.suppress(OSError):
            self._line.settimeout(2.0)
            self._line.sendall(b"r")
            self._line.recv(1)

    def close(self, refused: bool = False) -> None:
        """With `refused`, those who come to the meeting too late still hear why it did not come about."""
        if not refused:
            self.release()
        self._line.close()
        if refused:  # it ends by itself; somebody has to take note of that, or it stays in the list of processes
            threading.Thread(target=self._process.wait, name="unidist-host", daemon=True).start()
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=3.0)  # else it is still telling somebody; it ends by itself


_hosts: weakref.WeakSet[Host] = weakref.WeakSet()


def _forget_in_child() -> None:
    for host in _hosts:
        host.forget()


os.register_at_fork(after_in_child=_forget_in_child)

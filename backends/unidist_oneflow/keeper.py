"""Holds OneFlow's connections open for a moment after this process is gone.

A rank whose connection breaks aborts at once, with a C++ stack, before anybody could tell it which rank has died, and
why. So a tiny process shares the connections: a peer that is killed first falls silent, and the others hear the cause.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess

MOMENT = 5  # seconds, in which the cause reaches everyone


class Keeper:
    """Reads its input, which ends with this process; `dismiss` when all ranks have agreed to part."""

    def __init__(self, connections: list[int], launched: bool) -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", f"read _ || exec sleep {MOMENT}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=connections,
            # Slurm kills what is left of a process's group, and so would we, who tell the cause ourselves.
            start_new_session=not launched,
        )

    def dismiss(self) -> None:
        with contextlib.suppress(OSError):
            self._process.communicate(b"\n")


def connections() -> set[int]:
    """The TCP connections of this process. Not what listens: a port must be free when its process is gone."""
    return {fd for fd in map(int, os.listdir("/proc/self/fd")) if _is_connection(fd)}


def _is_connection(fd: int) -> bool:
    with contextlib.suppress(OSError):  # closed meanwhile, or nobody is connected
        if stat.S_ISSOCK(os.fstat(fd).st_mode):
            with socket.socket(fileno=os.dup(fd)) as one:
                return one.family in (socket.AF_INET, socket.AF_INET6) and bool(one.getpeername())
    return False

"""The end of another process of this machine, as whoever started it sees it.

A launcher may stand behind others, such as a shell, that it started for one rank alone. It takes notice of the rank's
end when these have ended, too.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from typing import NamedTuple

from unidist import network

MOST = 32  # ancestors that are told
# Seconds for the ancestors after the process itself. A shell around it ends at once; the daemon of a launcher on
# another node (orted, slurmstepd) lives as long as the job, and where nodes share their process numbers, as containers
# may, it would be waited for in vain, until the engine of this rank aborts.
WRAPPERS = 1.0


class Lineage(NamedTuple):
    """A process and its ancestors, and the space in which their numbers mean something."""

    space: str = ""
    pids: tuple[int, ...] = ()

    def wait_for_end(self, seconds: float) -> bool:
        """Whether the process, and the ancestors that it does not share with this one, have ended by then. False at
        once when they cannot be seen from here."""
        ours = own()
        if not self.space or self.space != ours.space:
            return False
        until = time.monotonic() + seconds
        for pid in self.pids:
            if pid in ours.pids:
                break
            if not _has_ended(pid, until):
                return False
            until = min(until, time.monotonic() + WRAPPERS)
        return True


def _has_ended(pid: int, until: float) -> bool:
    """Or ends before that time of the monotonic clock."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except (OSError, AttributeError):  # this kernel has no such thing
        return False
    try:
        watch = select.poll()  # unlike select(), it takes any number
        watch.register(handle, select.POLLIN)
        return bool(watch.poll(1000 * max(0.0, until - time.monotonic())))
    finally:
        os.close(handle)


UNKNOWN = Lineage()


def own() -> Lineage:
    with contextlib.suppress(OSError, ValueError, IndexError):
        space = f"{network.boot_id()} {os.readlink('/proc/self/ns/pid')}"
        pids = [os.getpid()]
        with contextlib.suppress(OSError):
            while pids[-1] > 1 and len(pids) < MOST:
                pids.append(int(network.process_status(pids[-1])[1]))
        return Lineage(space, tuple(pids))
    return UNKNOWN

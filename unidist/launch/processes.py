"""Small truths about processes on Linux: who descends from whom, and how to make a child end with its parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class EndWithParent:
    """For `preexec_fn`: the kernel kills the child when the thread that started it ends. Use from the main thread.

    All that needs memory or a lock is done before the fork.
    """

    def __init__(self) -> None:
        self._prctl = _prctl()
        self._parent = os.getpid()

    def __call__(self) -> None:
        if self._prctl:
            self._prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            if os.getppid() != self._parent:  # it went away before the line above
                os._exit(1)


def adopt_orphans() -> None:
    """From now on a grandchild that loses its parent becomes our child, so that `descendants` is complete."""
    prctl = _prctl()
    if prctl:
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _prctl() -> ctypes._NamedFuncPointer | None:
    with contextlib.suppress(OSError, AttributeError):
        return ctypes.CDLL(None, use_errno=True).prctl
    return None  # not Linux: the process groups still go


def descendants(root: int) -> list[int]:
    """Every living process below `root`, nearest first. Zombies are dead."""
    children = defaultdict(list)
    for pid in _pids():
        with contextlib.suppress(OSError):  # it ended meanwhile
            with open(f"/proc/{pid}/stat", "rb") as stat:
                state, parent = stat.read().rpartition(b")")[2].split()[:2]
            if state not in b"ZX":
                children[int(parent)].append(pid)
    found = list(children[root])
    for pid in found:
        found.extend(children[pid])
    return found


def carrying(mark: str) -> list[int]:
    """Processes whose environment holds `mark`, wherever they hang in the tree now."""
    found = []
    for pid in _pids():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as environ:
            if mark.encode() in environ.read() and pid != os.getpid():
                found.append(pid)
    return found


def kill(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill_descendants(within: float = 5.0) -> None:
    """Kill every process below this one, and what those start meanwhile, until none is left."""
    until = time.monotonic() + within  # one that hangs in the kernel cannot be waited for
    while (left := descendants(os.getpid())) and time.monotonic() < until:
        kill(left, signal.SIGKILL)
        time.sleep(0.005)


def stopping_signals() -> list[signal.Signals]:
    """What ends a job from outside, except for what whoever started us has switched off, as nohup does."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


def command(pid: int) -> str:
    """What it was started as, in short."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        program, *arguments = file.read().decode(errors="replace").split("\0")
        return " ".join([os.path.basename(program), *arguments])[:60].strip()
    return "?"


def closed(lifeline: int) -> bool:
    """Whether the other end of a pipe that nobody writes to has gone."""
    return bool(select.select([lifeline], [], [], 0)[0])


def rename(title: str) -> None:
    """Be this in `ps` and `pkill -f`: the kernel shows what stands where our arguments were."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/self/stat", "rb") as file:
        start, end = map(int, file.read().rpartition(b")")[2].split()[45:47])
        if start and end > start:
            ctypes.memmove(start, title.encode()[: end - start - 1].ljust(end - start, b"\0"), end - start)


def group(pid: int) -> int | None:
    with contextlib.suppress(ProcessLookupError):
        return os.getpgid(pid)
    return None


def gpus() -> int:
    """How many GPUs processes of this machine may use, as far as can be told without a framework."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    try:
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    except OSError:
        return 0


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _pids() -> Iterator[int]:
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/proc"):
            if name.isdigit():
                yield int(name)

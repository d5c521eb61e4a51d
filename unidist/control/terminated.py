"""A word between SIGTERM and the end, to say why.

torchrun and mpirun end the others as soon as one has died. What they would say then is what the person at the terminal
needs to know. The server of the meeting knows it: the connection of who died was closed before its launcher saw it.

A native call that holds the interpreter's lock delays all this until it returns, as nothing of Python runs before.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable

_pipe: tuple[int, int] | None = None


def _ours(number: int, _: object) -> None:
    """Python's own part of the handler. The work is done by the thread, as the main one may be in native code; it hears
    of the signal by the wakeup fd, unless somebody else, such as asyncio, has taken that away."""
    if _pipe is not None:
        with contextlib.suppress(OSError):
            os.write(_pipe[1], bytes([number]))


def install(ask: Callable[[], None]) -> None:
    """Only where nobody else has a use for the signal. `ask` says the cause and ends the process, if there is one."""
    global _pipe
    free = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if _pipe is not None or not free:
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    if (taken := signal.set_wakeup_fd(writer, warn_on_full_buffer=False)) != -1:
        signal.set_wakeup_fd(taken)
        os.close(reader)
        os.close(writer)
        return
    _pipe = (reader, writer)
    signal.signal(signal.SIGTERM, _ours)
    threading.Thread(target=_watch, args=(reader, ask), name="unidist-terminated", daemon=True).start()


def remove() -> None:
    """Leave everything as it was; also in a forked child, which has no thread of ours."""
    global _pipe
    if _pipe is None or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is _ours:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if (used := signal.set_wakeup_fd(-1)) not in (-1, _pipe[1]):
        signal.set_wakeup_fd(used)
    os.close(_pipe[1])  # ends the thread, which closes the other side
    _pipe = None


def _watch(reader: int, ask: Callable[[], None]) -> None:
    while heard := os.read(reader, 64):
        if signal.SIGTERM in heard and signal.getsignal(signal.SIGTERM) is _ours:
            ask()
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(None).signal(int(signal.SIGTERM), None)
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(1.0)
            os._exit(128 + signal.SIGTERM)
    os.close(reader)


# -- children that are forked ----------------------------------------------------------------------------------------
# Until `remove` has run in a child, its SIGTERM would be written to the pipe of its parent, which would end too.

_forking = threading.local()


def _hold() -> None:
    _forking.held = _pipe is not None and signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    if _forking.held:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _release() -> None:
    if getattr(_forking, "held", False):
        _forking.held = False
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _remove_in_child() -> None:
    remove()
    _release()


os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_remove_in_child)

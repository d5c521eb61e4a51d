"""The end of a process that must not wait for its engine.

After a failure an engine's own way out may wait for ranks that never come. What is Python's is done all the same:
threads are joined, atexit handlers are called, once, and what was written to files gets there. Then the process ends,
before anything native is taken down. A child that the script has forked ends in the same way: the engine's threads are
not there, and its own way out would wait for them, or for the other ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

FLUSHING = 30.0  # seconds for what was written: a thread that is stuck in writing holds the file's lock


@dataclass(eq=False)
class Shortcut:
    """`needed` is asked when the script has ended, with the error that nobody has caught, if there is one."""

    needed: Callable[[BaseException | None], bool]
    skipped: tuple[Callable[..., Any], ...] = ()  # atexit handlers that may wait for other ranks
    last: Callable[[int], None] = lambda code: None  # called with the exit code after all atexit handlers


_offered: list[Shortcut] = []
_process = -1  # that of the Strategy; another one is its forked child
_traced = False  # since `note_the_end`
_left_by: BaseException | None = None  # what has left the outermost frame since then
_last_before: BaseException | None = None  # the uncaught error before, as of an interactive session
_said: tuple[object, BaseException | None] | None = None  # by the last sys.exit(), and the uncaught error before it


def offer(shortcut: Shortcut) -> None:
    """Call it in the main thread; from now on the end of the script looks whether the shortcut is needed."""
    global _process
    if _process == -1:
        _install()
    _process = os.getpid()
    _offered.append(shortcut)


def withdraw(shortcut: Shortcut) -> None:
    if shortcut in _offered:
        _offered.remove(shortcut)


def note_the_end() -> None:
    """Call it when an error leaves a Strategy and a shortcut will be needed: from now on the exit code is watched for.

    The interpreter tells nobody which code it ends with, but the outermost frame can be traced: the last exception seen
    there ends the script, unless it comes to a return. From now on every call of a function costs a little more; the
    training is over by then.
    """
    if threading.current_thread() is not threading.main_thread() or sys.gettrace() is not None:
        return  # a debugger has this place: what sys.exit() was told has to do
    global _left_by, _traced, _last_before
    _traced, _last_before = True, getattr(sys, "last_value", None)
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    error = sys.exc_info()[1]
    if error is not None and error.__traceback__ is not None and error.__traceback__.tb_frame is frame:
        _left_by = error  # it has been seen there already
    frame.f_trace, frame.f_trace_lines = _trace, False
    sys.settrace(_trace_no_other)


def code() -> int:
    """What the process ends with, as far as it can be known."""
    error = _uncaught()
    if error is not None:
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    status = None if _traced or _said is None else _said[0]
    if isinstance(_left_by, SystemExit):
        status = _left_by.code
    return status & 0xFF if isinstance(status, int) else int(status is not None)  # a text has been printed


def _trace_no_other(*_: object) -> None:
    pass


def _trace(frame: FrameType, event: str, argument: Any) -> Any:
    global _left_by
    import dis

    if event == "exception":
        _left_by = argument[1]
    elif event == "return" and dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN"):
        _left_by = None  # not by an exception: all were caught
    return _trace


def _install() -> None:
    """The interpreter joins the threads and then calls the atexit handlers; only between the two is none called yet."""
    join, leave = threading._shutdown, sys.exit  # type: ignore[attr-defined]

    def exit(status: Any = None, /) -> NoReturn:
        global _said
        if threading.current_thread() is threading.main_thread():
            _said = status, getattr(sys, "last_value", None)
        leave(status)

    def shutdown() -> None:
        if sys._getframe().f_back is not None:  # multiprocessing calls it and goes on
            join()
            return
        if sys.gettrace() is _trace_no_other:
            sys.settrace(None)
        forked = os.getpid() != _process
        needed = [shortcut for shortcut in _offered if forked or shortcut.needed(_uncaught())]
        join()
        if needed:
            _end(needed, forked)
        _offered.clear()  # a KVStore of MXNet's that outlives the interpreter aborts the process

    sys.exit = exit
    threading._shutdown = shutdown  # type: ignore[attr-defined]
    os.register_at_fork(after_in_child=_forget_in_child)


def _forget_in_child() -> None:
    """What sys.exit() was told before the fork, and was caught, is not how the child ends."""
    global _said
    _said = None


def _end(shortcuts: list[Shortcut], forked: bool) -> None:
    ends_with = code()
    for function in (handler for one in shortcuts for handler in one.skipped):
        atexit.unregister(function)
    atexit._run_exitfuncs()
    for one in [] if forked else shortcuts:  # a child has nothing to tell the other ranks
        with contextlib.suppress(KeyboardInterrupt):  # whoever is tired of waiting
            one.last(ends_with)
    flushing = threading.Thread(target=_flush_all, daemon=True)
    flushing.start()
    flushing.join(FLUSHING)
    os._exit(ends_with)


def _uncaught() -> BaseException | None:
    """The error that ends the script."""
    error = getattr(sys, "last_value", None)  # set before sys.excepthook is called, whatever that is
    if _traced:
        if _left_by is None and error is not _last_before:  # somebody has ended the tracing
            return error
        return None if isinstance(_left_by, SystemExit) else _left_by
    return None if _said is not None and _said[1] is error else error


def _flush_all() -> None:
    for candidate in gc.get_objects():
        if issubclass(type(candidate), io.IOBase):
            with contextlib.suppress(Exception):
                candidate.flush()

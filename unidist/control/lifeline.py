"""Ends this process, with the cause in one line, when another rank is gone; and tells the others when this one goes.

Where a launcher of ours watches all ranks, it ends them and says why; here the cause is only told to it. Elsewhere
(torchrun, srun, mpirun, by hand) each process does it for itself, from the thread that reads the control connection,
so also while the main thread is blocked in native code.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

from unidist.control import ending, terminated
from unidist.control.causes import Cause, called
from unidist.control.client import Control, first_cause
from unidist.control.heartbeat import Place
from unidist.control.protocol import Header
from unidist.errors import CommunicationError

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]

ANSWER = 2.0  # seconds to wait for the server to say whether another was first
COURTESY = 5.0  # seconds for the one that failed to end before us: launchers name the first that ends as the cause
LOOK = 0.3  # seconds in which a launcher looks at its processes


class Lifeline:
    """From `start` to `close` this rank's end is everybody's business. `place` is how far it has come."""

    def __init__(
        self,
        control: Control,
        role: str,
        rank: int,
        host: str,
        launched: bool,
        place: Callable[[], Place] = Place,
        end: Callable[[str], None] | None = None,
    ) -> None:
        self._control, self._role, self.rank, self._host = control, role, rank, host
        self._launched, self._place = launched, place
        self._end_with = end  # given the line that says why, in place of what is done here
        self._over = False
        self._ending, self._first_is_gone = threading.Lock(), threading.Event()

    def start(self) -> Lifeline:
        self._control.on_push = self._heard
        self._control.on_loss = self._lost
        _watched.add(self)
        _install()
        if not self._launched:
            terminated.install(self._terminated)
        return self

    def engine_is_up(self, rank: int) -> None:
        """It may have given this process another rank, and has put its own hooks in place."""
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)  # what comes last is called first: engines may wait for their peers at the end
        if rank != self.rank:
            self.rank = rank
            with contextlib.suppress(CommunicationError):
                self._control.ask("rename", rank=rank)

    def close(self) -> None:
        """All is well: this rank leaves."""
        if not self._over:
            self._over = True
            with contextlib.suppress(CommunicationError):
                self._control.ask("goodbye")
        _watched.discard(self)
        terminated.remove()

    def gives_up(self, error: BaseException) -> None:
        """An error leaves the Strategy. The script may still catch it, but this rank takes part no more."""
        if not self._over:
            fatal = isinstance(error, SystemExit) and error.code not in (None, 0)
            self._over = True  # from here on, to hear that it was this rank that failed is no news
            self._report("gives_up", error, fatal=fatal, **self._place()._asdict())

    def fails(self, error: BaseException, **member: int) -> None:
        """Nobody has caught the error: the process is about to end. `member` is the number of its connection, where
        this is another one."""
        _watched.discard(self)
        self._over = True
        self._report("fails", error, **member)

    def exits(self) -> None:
        """The script has ended, and nobody has closed the Strategy."""
        if not self._over:
            self._over = True
            with contextlib.suppress(CommunicationError):
                self._control.ask("exits", together=self._place().together)

    def _terminated(self) -> None:
        """Somebody has sent SIGTERM: a launcher that has seen another one die, or the one who wants the job to end."""
        self._control.timeout = ANSWER
        with contextlib.suppress(CommunicationError):
            first = first_cause(self._control.ask("first"))
            if first is not None and (first.role, first.rank) != (self._role, self.rank):
                self._end(str(first), first)

    def _report(self, op: str, error: BaseException, **more: Any) -> None:
        said: dict[str, Any] = {
            "what": describe(error),
            "lines": last_lines(error),
            "echo": isinstance(error, CommunicationError),
        }
        with contextlib.suppress(CommunicationError):
            if self._launched:
                return self._control.tell(op, **said, **more)
            self._control.timeout = ANSWER
            if first := first_cause(self._control.ask(op, **said, **more)):
                self._end(str(first), first)

    # -- in the thread that reads the connection ---------------------------------------------------------------

    def _heard(self, header: Header) -> None:
        if header["push"] == "ended":
            self._first_is_gone.set()
        if header["push"] == "over" and self._role != "worker":
            end_process(0)
        if header["push"] == "failure" and not self._launched and not self._over:
            cause = Cause.from_data(header["cause"])
            if (cause.role, cause.rank) == (self._role, self.rank):  # it waits for the others to close their Strategy
                say(f"unidist: RanksDisagree: {cause}")
                end_process()
            else:
                threading.Thread(target=self._end, args=(str(cause), cause), daemon=True).start()

    def _lost(self, why: str) -> None:
        self._first_is_gone.set()
        if not self._launched and not self._over:
            self._end(f"the server of the job's meeting is gone ({why}): its host died or is cut off")

    def _end(self, cause: str, first: Cause | None = None) -> None:
        """Once, whoever hears of it first; and after the process that failed first, if there is one."""
        with self._ending:
            line = f"unidist: PeerFailed: {cause}; {called(self._role, self.rank)} on {self._host} ends with it"
            if self._end_with is not None:
                self._end_with(line)
                return
            say(line)
            if first is not None:
                until = time.monotonic() + COURTESY
                if not first.lineage.wait_for_end(COURTESY) and not first.lost:
                    self._first_is_gone.wait(max(0.0, until - time.monotonic()))
                if not first.lost:  # else it has been gone for a while, and an engine may abort in the meantime
                    time.sleep(LOOK)
            end_process()


def describe(error: BaseException) -> str:
    """In one line."""
    if isinstance(error, SystemExit):
        return f"sys.exit({error.code!r}) has left its Strategy before the others were done"
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def last_lines(error: BaseException) -> list[str]:
    """Of its traceback."""
    if isinstance(error, SystemExit):
        return []
    with contextlib.suppress(Exception):
        return "".join(traceback.format_exception(type(error), error, error.__traceback__)).splitlines()[-20:]
    return []


def say(line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())


def end_process(code: int = 1) -> None:
    """At once and from any thread: nothing here waits for the interpreter, the engine or a reader of our output."""
    flushing = threading.Thread(target=_flush, daemon=True)
    with contextlib.suppress(RuntimeError):  # no thread can be started while the interpreter ends
        flushing.start()
        flushing.join(0.5)
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


# -- how a process may end -------------------------------------------------------------------------------------------

_watched: weakref.WeakSet[Lifeline] = weakref.WeakSet()
_installed = False
_awaited = False  # an error is on its way out of the process, and others wait for its end


def _install() -> None:
    """Once for the process: uncaught exceptions and the end of the interpreter."""
    global _installed
    if _installed:
        return
    _installed = True
    show: Hook = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if getattr(sys, "last_value", None) is error:  # else somebody calls us who goes on
            _report_uncaught(error)
        show(kind, error, trace)

    sys.excepthook = hook
    atexit.register(_at_exit)
    # What is left of the interpreter's end, to take down all modules, takes seconds where the machine is busy and the
    # engine is large. The survivors wait for it, so that launchers see this process end first.
    ending.offer(ending.Shortcut(_is_awaited))


def _report_uncaught(error: BaseException) -> None:
    global _awaited
    for lifeline in list(_watched):
        lifeline.fails(error)
        _awaited |= not lifeline._launched and not isinstance(error, KeyboardInterrupt)


def _is_awaited(uncaught: BaseException | None) -> bool:
    if uncaught is not None:
        _report_uncaught(uncaught)  # unless the hook has: somebody may have put another in its place
    return _awaited


def _at_exit() -> None:
    for lifeline in list(_watched):
        lifeline.exits()

"""Starts the processes of a plan, shows what they print, watches them, and ends them together.

One loop, no threads: output, ended processes, signals and the death of whoever started us are all events of a selector.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from unidist.control import Beat, Cause
from unidist.errors import LaunchError
from unidist.launch import processes as system
from unidist.launch import report
from unidist.launch.output import Output, Stream
from unidist.launch.plan import Process, inherited
from unidist.launch.report import Failure
from unidist.launch.screen import OutputLost, Screen, Standing
from unidist.launch.signals import Signals

TICK = 0.25  # how often to look at what is no event: heartbeats, deadlines
ECHO_WAIT = 3.0  # how long the true cause may take to show after an error that looks like its echo
CODE_WAIT = 1.5  # how long a process that is known to be the cause may take to end, and show its code
ENDING_WAIT = 10.0  # ... where it has said that it ends: on a busy machine that takes its time
TIMED_OUT = 124  # as timeout(1) has it
LEFT_BEHIND_WAIT = 1.0  # the grace time of what workers that ended well have left running
SERVICES_WAIT = 5.0  # how long servers and schedulers may take to end by themselves after the workers


@dataclass(frozen=True)
class Outcome:
    """How a job ended. `text` is the summary, the cause in its first line; empty when all went well."""

    code: int
    text: str = ""
    again: bool = False  # a failure, so that a restart makes sense; not a stop that somebody asked for


@dataclass
class _Running:
    process: Process
    popen: subprocess.Popen[bytes]
    streams: dict[str, Stream]
    code: int | None = None
    ended: float = 0.0
    stopped: bool = False  # we had already asked it to end
    told: Cause | None = None  # what it, or the loss of its connection, told the control plane
    echoes: Sequence[str] = ()

    @property
    def failed(self) -> bool:
        return self.code not in (None, 0) and not self.stopped

    @property
    def failure(self) -> Failure:
        lines = self.streams["stderr"].last or self.streams["stdout"].last
        return Failure(self.process.name, socket.gethostname(), self.code, list(lines), self.told, self.echoes)

    @property
    def trouble(self) -> float:
        """When it went wrong: a traceback is printed some time before the process is gone. An old one was handled."""
        last = self.ended or time.monotonic()
        printed = self.streams["stderr"].trouble
        return printed if last - printed < ECHO_WAIT else self.ended or float("inf")


@dataclass
class Supervisor:
    plan: Sequence[Process]
    screen: Screen
    signals: Signals
    grace: float = 5.0
    timeout: float | None = None  # without progress for so many seconds, the job is hung
    beats: Callable[[], dict[str, Beat]] | None = None
    causes: Callable[[], list[Cause]] = list  # of failures that the control plane was told of, the first one first
    verdict: Callable[[], Cause | None] = lambda: None  # the first of them, once it is certain
    worker_ended: Callable[[int, str], None] = lambda rank, host: None  # tells the control plane
    echoes: Sequence[str] = ()  # what the engine says when a peer has gone, see `Plugin.echoes`
    log_dir: Path | None = None
    append: bool = False  # to the files there, after a restart
    master: bool = False  # call worker 0 "master"
    lifeline: int | None = None  # a pipe that closes when whoever started us dies
    started: Callable[[], object] = lambda: None

    _running: list[_Running] = field(default_factory=list, init=False)
    _heard: int = field(default=0, init=False)  # signals that were answered by ending the job; one more means: at once
    _excused: float = field(default=0.0, init=False)  # when there was last a reason for a process not to get on

    def run(self) -> Outcome:
        """Until every process has ended. Call it from the main thread of a process that has no other children."""
        system.adopt_orphans()
        self._output = Output(self.plan, self.screen, self.log_dir, self.append, self.master, self.echoes)
        self._selector, self._urgent = selectors.DefaultSelector(), selectors.DefaultSelector()
        with self._selector, self._urgent:
            for fd in (self.signals.fd, *([] if self.lifeline is None else [self.lifeline])):
                for selector in (self._selector, self._urgent):
                    selector.register(fd, selectors.EVENT_READ, None)
            try:
                self._start()
                self.started()
                outcome = self._watch(Standing())
                self.screen.status("")
            except OutputLost as lost:
                outcome = Outcome(lost.exit_code, str(lost))
            finally:
                # Whatever happened, also an error of our own: nothing stays behind.
                system.kill_descendants()
                with contextlib.suppress(OutputLost):
                    self._last_words()
                self.screen.forget()  # what could not be shown
                for child in self._running:
                    child.popen.wait()
        return outcome

    @property
    def _impatient(self) -> bool:
        return len(self.signals.received) > self._heard

    # -- starting ----------------------------------------------------------------------------------------------

    def _start(self) -> None:
        base = inherited()
        if self.screen.live:
            base["UNIDIST_TERMINAL"] = "1"
        end_with_parent = system.EndWithParent()
        for process, streams in zip(self.plan, self._output.streams, strict=True):
            try:
                popen = subprocess.Popen(
                    process.command,
                    env={**base, **process.env},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,  # its own process group, so that its children can be reached
                    preexec_fn=end_with_parent,
                )
            except OSError as error:
                raise LaunchError(f"cannot start {process.name}: {process.command[0]}: {error.strerror}") from None
            self._running.append(_Running(process, popen, streams))
            for name in ("stdout", "stderr"):
                self._selector.register(getattr(popen, name), selectors.EVENT_READ, streams[name])

    # -- watching ----------------------------------------------------------------------------------------------

    def _watch(self, standing: Standing) -> Outcome:
        while True:
            self._events(TICK)
            if self.signals.received:
                return self._stopped_by(self.signals.received[0])
            if any(child.failed for child in self._running) or self.verdict():
                return self._failed()
            if all(child.code == 0 for child in self._running if child.process.is_worker):
                return self._well_done()
            if self.timeout or self.screen.live:
                living = self._alive(self.beats() if self.beats else {})
                if self.timeout and self._is_stuck(living, self.timeout):
                    return self._hung(living, self.timeout)
                if not self._unheard(living):
                    self.screen.status(standing.line([beat for beat in living if beat.role == "worker"]))

    def _alive(self, beats: dict[str, Beat]) -> list[Beat]:
        living = {(child.process.role, child.process.rank) for child in self._running if child.code is None}
        return [beat for beat in beats.values() if (beat.role, beat.rank) in living]

    def _is_stuck(self, beats: Sequence[Beat], timeout: float) -> bool:
        if any(beat.excuses for beat in beats):
            self._excused = time.monotonic()  # the others may be waiting for that one
        return time.monotonic() - self._excused > timeout and any(beat.stuck > timeout for beat in beats)

    def _unheard(self, beats: Sequence[Beat]) -> list[str]:
        heard = {(beat.role, beat.rank) for beat in beats}
        workers = [child.process for child in self._running if child.process.is_worker and child.code is None]
        return [worker.name for worker in workers if (worker.role, worker.rank) not in heard]

    def _events(self, wait: float) -> None:
        self.screen.write()
        self._output.tick()
        # When our reader is slow the processes have to wait for it, as they would without us; signals and ends do not.
        if self.screen.full:
            self._excused = time.monotonic()
        events = self._urgent.select(min(wait, 0.02)) if self.screen.full else self._selector.select(wait)
        for key, _ in events:
            if isinstance(key.data, Stream):
                self._read(key.fd, key.data)
            elif key.fd == self.signals.fd:
                self.signals.read()
            else:
                # The launcher was killed. There is nobody to report to: just end everything, at once.
                system.kill_descendants()
                os._exit(137)
        self._reap()

    def _read(self, fd: int, stream: Stream) -> None:
        data = os.read(fd, 1 << 16)
        if data:
            stream.feed(data)
        else:
            self._selector.unregister(fd)

    def _reap(self) -> None:
        # Not Popen.poll: grandchildren that we adopted are to be reaped too.
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                for child in self._running:
                    if child.popen.pid == pid:
                        child.code = child.popen.returncode = os.waitstatus_to_exitcode(status)
                        child.ended = time.monotonic()
                        if child.process.is_worker:
                            self.worker_ended(child.process.rank, socket.gethostname())

    # -- ending ------------------------------------------------------------------------------------------------

    def _failed(self) -> Outcome:
        """Find the first cause. It may be slower to die than those it takes along.

        Who was connected to the control plane is known from there. Others have only their exit codes and words.
        """
        begun = time.monotonic()
        while True:
            self._drain()
            told = self._told()
            failed = sorted((child for child in self._running if child.failed), key=lambda child: child.trouble)
            causes = [told] if told else [child for child in failed if not child.failure.is_echo]
            first_trouble = causes[0].trouble if causes else float("inf")
            dying = [child for child in self._running if child.code is None and child.trouble < first_trouble]
            settled = (causes and not dying) if told is None else told.code is not None
            waited, patience = time.monotonic() - begun, ECHO_WAIT
            if told is not None and told.told is not None:
                patience = ENDING_WAIT if told.told.ending else CODE_WAIT
            if settled or all(child.code is not None for child in self._running) or waited > patience:
                break
            self._events(0.05)
        first = (causes or failed)[0]
        for child in self._running:
            if child is not first:
                child.streams["stderr"].another_failed_first()
        failure = first.failure  # before it is stopped, which may change its code
        living = sum(child.code is None and child is not first for child in self._running)
        self._stop()
        others = [child.failure for child in failed if child is not first]
        return Outcome(failure.exit_code, report.failed(failure, others, living), again=True)

    def _told(self) -> _Running | None:
        """Who failed first, as the control plane was told."""
        found = {(child.process.role, child.process.rank): child for child in self._running if not child.stopped}
        first = None
        for cause in reversed(self.causes()):
            if child := found.get((cause.role, cause.rank)):
                child.told, first = cause, child
        return first

    def _hung(self, beats: Sequence[Beat], timeout: float) -> Outcome:
        ended = [child.process.name for child in self._running if child.process.is_worker and child.code is not None]
        missing = [f"{name}: not heard of" for name in self._unheard(beats)] + [f"{name}: has ended" for name in ended]
        text = report.hung(beats, missing, timeout)
        # With PYTHONFAULTHANDLER set this prints where each is in its code, also from inside a C++ call.
        system.kill([child.popen.pid for child in self._running if child.code is None], signal.SIGABRT)
        self._stop(0.5)
        return Outcome(TIMED_OUT, text, again=True)

    def _stopped_by(self, number: int) -> Outcome:
        self._stop()
        return Outcome(
            128 + number, f"stopped by {'Ctrl-C' if number == signal.SIGINT else signal.Signals(number).name}"
        )

    def _well_done(self) -> Outcome:
        """The workers are done. Servers and schedulers usually notice; those that do not are not missed."""
        until = time.monotonic() + SERVICES_WAIT
        while any(child.code is None for child in self._running) and time.monotonic() < until:
            self._events(TICK)
            if self.signals.received:
                return self._stopped_by(self.signals.received[0])
        until = time.monotonic() + 0.5  # for what ends with them, a moment later
        while (left := self._left_behind()) and time.monotonic() < until:
            self._events(0.02)
        self._stop(grace=min(self.grace, LEFT_BEHIND_WAIT))
        return Outcome(0, f"ended what the workers had left running: {', '.join(left)}" if left else "")

    def _left_behind(self) -> list[str]:
        groups = {child.popen.pid for child in self._running if child.code is None}
        return [
            f"{system.command(pid)} (process {pid})"
            for pid in system.descendants(os.getpid())
            if system.group(pid) not in groups
        ]

    def _stop(self, delay: float = 0.0, grace: float | None = None) -> None:
        """SIGTERM to every process group and to who left it; SIGKILL after the grace time or a second signal."""
        self._heard = len(self.signals.received)
        for child in self._running:
            child.stopped = child.code is None
        until = time.monotonic() + delay
        while time.monotonic() < until and any(child.code is None for child in self._running):
            self._events(0.05)
        groups = {child.popen.pid for child in self._running}  # a leader may be gone, its children not
        strays = [pid for pid in system.descendants(os.getpid()) if system.group(pid) not in groups]
        for group in groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGTERM)
        system.kill(strays, signal.SIGTERM)
        until = time.monotonic() + (self.grace if grace is None else grace)
        while time.monotonic() < until and not self._impatient and system.descendants(os.getpid()):
            self._events(0.05)
        system.kill_descendants()

    def _drain(self) -> None:
        """Read what those that have ended printed last. The others may print without end."""
        ended = [stream for child in self._running if child.code is not None for stream in child.streams.values()]
        until = time.monotonic() + 1.0
        while any(key.data in ended for key, _ in self._selector.select(0)) and time.monotonic() < until:
            self._events(0)

    def _last_words(self) -> None:
        """Show what is left in the pipes, to the end, unless a signal says that nobody wants to see it."""
        until = time.monotonic() + 2.0  # only a process that escaped us could hold a pipe open
        while not self._impatient and self._unread() and (self.screen.full or time.monotonic() < until):
            self._events(0.05)
        self._output.close()
        while not self._impatient and self.screen.waiting:
            self._events(0.02)

    def _unread(self) -> bool:
        return any(isinstance(key.data, Stream) for key in self._selector.get_map().values())

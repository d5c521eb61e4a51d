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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from unidist.control import Beat
from unidist.errors import LaunchError
from unidist.launch import processes as system
from unidist.launch import report
from unidist.launch.output import Output, Screen, Stream
from unidist.launch.plan import Process, inherited
from unidist.launch.report import Failure

TICK = 0.25  # how often to look at what is no event: heartbeats, deadlines
ECHO_WAIT = 3.0  # how long the true cause may take to show after an error that looks like its echo
TIMED_OUT = 124  # as timeout(1) has it
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

    @property
    def failed(self) -> bool:
        return self.code not in (None, 0) and not self.stopped

    @property
    def failure(self) -> Failure:
        lines = self.streams["stderr"].last or self.streams["stdout"].last
        return Failure(self.process.name, socket.gethostname(), self.code or 0, list(lines))

    @property
    def trouble(self) -> float:
        """When it went wrong: a traceback is printed some time before the process is gone."""
        return min(self.ended or float("inf"), self.streams["stderr"].trouble)


@dataclass
class Supervisor:
    plan: Sequence[Process]
    screen: Screen
    grace: float = 5.0
    timeout: float | None = None  # without progress for so many seconds, the job is hung
    beats: Callable[[], dict[str, Beat]] | None = None
    log_dir: Path | None = None
    append: bool = False  # to the files there, after a restart
    master: bool = False  # call worker 0 "master"
    lifeline: int | None = None  # a pipe that closes when whoever started us dies
    started: Callable[[], object] = lambda: None

    _running: list[_Running] = field(default_factory=list, init=False)
    _signals: list[int] = field(default_factory=list, init=False)

    def run(self) -> Outcome:
        """Until every process has ended. Call it from the main thread of a process that has no other children."""
        system.adopt_orphans()
        output = Output(self.plan, self.screen, self.log_dir, self.append, self.master)
        self._selector, self._urgent = selectors.DefaultSelector(), selectors.DefaultSelector()
        with self._selector, self._urgent, self._wakeup():
            if self.lifeline is not None:
                self._listen(self.lifeline)
            try:
                self._start(output)
                self.started()
                outcome = self._watch()
            except BrokenPipeError:
                outcome = Outcome(141, "nobody reads our output any more (broken pipe)")
            finally:
                # Whatever happened, also an error of our own: nothing stays behind.
                system.kill_descendants()
                with contextlib.suppress(BrokenPipeError):
                    self._last_words(output)
                self.screen.forget()  # what could not be shown
                for each in self._running:
                    each.popen.wait()
        return outcome

    # -- starting ----------------------------------------------------------------------------------------------

    def _start(self, output: Output) -> None:
        base = inherited()
        end_with_parent = system.EndWithParent()
        for process, streams in zip(self.plan, output.streams, strict=True):
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

    @contextlib.contextmanager
    def _wakeup(self) -> Iterator[None]:
        """Signals arrive as bytes in a pipe, so that none is lost between two looks."""
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        numbers = (signal.SIGCHLD, *system.stopping_signals())
        before = {number: signal.signal(number, lambda *_: None) for number in numbers}
        wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self._listen(reader)
        self._signal_fd = reader
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(reader)
            os.close(writer)

    def _listen(self, fd: int) -> None:
        for selector in (self._selector, self._urgent):
            selector.register(fd, selectors.EVENT_READ, None)

    # -- watching ----------------------------------------------------------------------------------------------

    def _watch(self) -> Outcome:
        while True:
            self._events(TICK)
            if self._signals:
                return self._stopped_by(self._signals[0])
            if any(each.failed for each in self._running):
                return self._failed()
            if all(each.code == 0 for each in self._running):
                return Outcome(0)
            if all(each.code == 0 for each in self._running if each.process.is_worker):
                return self._end_services()
            beats = self.beats().values() if self.timeout and self.beats else ()
            if self.timeout and any(beat.stuck > self.timeout for beat in beats):
                return self._hung(list(beats), self.timeout)

    def _events(self, wait: float) -> None:
        self.screen.write()
        # When our reader is slow the processes have to wait for it, as they would without us; signals and ends do not.
        events = self._urgent.select(min(wait, 0.02)) if self.screen.full else self._selector.select(wait)
        for key, _ in events:
            if isinstance(key.data, Stream):
                self._read(key.fd, key.data)
            elif key.fd == self._signal_fd:
                with contextlib.suppress(BlockingIOError):
                    self._signals += [n for n in os.read(key.fd, 4096) if n != signal.SIGCHLD]
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
                for each in self._running:
                    if each.popen.pid == pid:
                        each.code = each.popen.returncode = os.waitstatus_to_exitcode(status)
                        each.ended = time.monotonic()

    # -- ending ------------------------------------------------------------------------------------------------

    def _failed(self) -> Outcome:
        """Find the first cause among those that have failed. It may be slower to die than those it takes along."""
        until = time.monotonic() + ECHO_WAIT
        while True:
            self._drain()
            failed = sorted((each for each in self._running if each.failed), key=lambda each: each.trouble)
            causes = [each for each in failed if not each.failure.is_echo]
            first_trouble = causes[0].trouble if causes else float("inf")
            dying = [each for each in self._running if each.code is None and each.trouble < first_trouble]
            settled = (causes and not dying) or all(each.code is not None for each in self._running)
            if settled or time.monotonic() > until:
                break
            self._events(0.05)
        first = (causes or failed)[0]
        living = sum(each.code is None for each in self._running)
        self._stop()
        others = [each.failure for each in failed if each is not first]
        return Outcome(first.failure.exit_code, report.failed(first.failure, others, living), again=True)

    def _hung(self, beats: Sequence[Beat], timeout: float) -> Outcome:
        heard = {(beat.role, beat.rank) for beat in beats}
        missing = [
            f"{each.process.name}: {'not heard of' if each.code is None else 'has ended'}"
            for each in self._running
            if each.process.is_worker and (each.process.role, each.process.rank) not in heard
        ]
        text = report.hung(beats, missing, timeout)
        # With PYTHONFAULTHANDLER set this prints where each is in its code, also from inside a C++ call.
        system.kill([each.popen.pid for each in self._running if each.code is None], signal.SIGABRT)
        self._stop(0.5)
        return Outcome(TIMED_OUT, text, again=True)

    def _stopped_by(self, number: int) -> Outcome:
        self._signals.clear()  # the next one, while stopping, means: at once
        self._stop()
        return Outcome(
            128 + number, f"stopped by {'Ctrl-C' if number == signal.SIGINT else signal.Signals(number).name}"
        )

    def _end_services(self) -> Outcome:
        """The workers are done. Servers and schedulers usually notice; those that do not are not missed."""
        until = time.monotonic() + SERVICES_WAIT
        while any(each.code is None for each in self._running) and time.monotonic() < until:
            self._events(TICK)
            if self._signals:
                return self._stopped_by(self._signals[0])
        self._stop()
        return Outcome(0)

    def _stop(self, delay: float = 0.0) -> None:
        """SIGTERM to every process group and to who left it; SIGKILL after the grace time or a second signal."""
        for each in self._running:
            each.stopped = each.code is None
        until = time.monotonic() + delay
        while time.monotonic() < until and any(each.code is None for each in self._running):
            self._events(0.05)
        groups = {each.popen.pid for each in self._running}  # a leader may be gone, its children not
        strays = [pid for pid in system.descendants(os.getpid()) if system.group(pid) not in groups]
        for group in groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGTERM)
        system.kill(strays, signal.SIGTERM)
        until = time.monotonic() + self.grace
        while time.monotonic() < until and not self._signals and system.descendants(os.getpid()):
            self._events(0.05)
        system.kill_descendants()

    def _drain(self) -> None:
        """Read what those that have ended printed last. The others may print without end."""
        ended = [stream for each in self._running if each.code is not None for stream in each.streams.values()]
        until = time.monotonic() + 1.0
        while any(key.data in ended for key, _ in self._selector.select(0)) and time.monotonic() < until:
            self._events(0)

    def _last_words(self, output: Output) -> None:
        """Show what is left in the pipes, to the end, unless a signal says that nobody wants to see it."""
        until = time.monotonic() + 2.0  # only a process that escaped us could hold a pipe open
        while not self._signals and self._unread() and (self.screen.full or time.monotonic() < until):
            self._events(0.05)
        output.close()
        while not self._signals and self.screen.waiting:
            self._events(0.02)

    def _unread(self) -> bool:
        return any(isinstance(key.data, Stream) for key in self._selector.get_map().values())

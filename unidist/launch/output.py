"""What the processes print, on one screen: whole lines with a prefix, fewer progress bars, one copy of an error."""

from __future__ import annotations

import contextlib
import os
import re
import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from unidist.errors import LaunchError
from unidist.launch.plan import Process
from unidist.launch.report import says_that_a_peer_is_gone

BAR_EVERY = 2.0  # seconds between two shown states of a progress bar
LONGEST_LINE = 1 << 20
ERROR_HELD = 1.0  # seconds that the lines of an error may be kept back, until it is known whether another showed it
FAREWELL_HELD = 5.0  # ... where it says that a peer is gone: the peer's own error should come first
BACKLOG = 1 << 20  # bytes that may wait for a slow reader before the processes have to
_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)
_RESET = b"\x1b[0m"

# What is shown once only: a traceback; a syntax error of the script, which comes first and without a heading; or the
# interpreter's own complaint. And how each ends.
_TRACEBACK = re.compile(rb"(  \+ Exception Group )?Traceback \(most recent call last\):")
_SYNTAX_ERROR = re.compile(rb'  File "')
_LAST_LINE = re.compile(rb"[A-Za-z_][\w.]*(: |$)")
_ERROR_IN_ONE_LINE = re.compile(rb"\S*python[\d.]*: (can't open|No module named|Error while finding module)")
_CHAIN = re.compile(rb"(During handling of the above exception|The above exception was the direct cause)")


class OutputLost(Exception):
    """Our own standard output or error cannot be written any more."""

    def __init__(self, error: OSError) -> None:
        gone = isinstance(error, BrokenPipeError)
        super().__init__("nobody reads our output any more (broken pipe)" if gone else f"our output: {error.strerror}")
        self.exit_code = 141 if gone else 1  # as a shell counts SIGPIPE


class Screen:
    """Writes whole lines to the launcher's own standard output and error, as fast as somebody reads them.

    It never waits for a reader by itself (`| less`): a job that nobody looks at must still end when it fails.
    """

    def __init__(self, quiet: bool = False, colour: bool | None = None, out: int = 1, err: int = 2) -> None:
        self.quiet = quiet  # only worker 0
        self._fds = {"stdout": out, "stderr": err}
        self._colour = {
            name: ("NO_COLOR" not in os.environ and os.isatty(fd)) if colour is None else colour
            for name, fd in self._fds.items()
        }
        self._errors: dict[bytes, str] = {}  # the text of each error shown -> who showed it first
        self._waiting: deque[tuple[int, bytes]] = deque()  # one queue for both, to keep their order
        self._size = 0

    def line(self, stream: str, prefix: str, colour: int, text: bytes) -> None:
        head = f"[{prefix}] ".encode()
        if self._colour[stream]:
            head = b"\x1b[%dm%s%s" % (_COLOURS[colour % len(_COLOURS)], head, _RESET)
        self._put(self._fds[stream], head + text + b"\n")

    def say(self, text: str, hopeless: Callable[[], bool]) -> None:
        """A line of unidist's own, on standard error. This one does wait until it is written, unless `hopeless`."""
        self._put(self._fds["stderr"], f"unidist: {text}\n".encode(errors="replace"))
        with contextlib.suppress(OutputLost):  # then there is nobody to be told
            self.write()
            while self._waiting and not hopeless():
                _takes(self._waiting[0][0], within=0.1)
                self.write()

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    @property
    def full(self) -> bool:
        return self._size > BACKLOG

    def _put(self, fd: int, data: bytes) -> None:
        self._waiting.append((fd, data))
        self._size += len(data)

    def write(self) -> None:
        """Write what waits, as far as it is taken at once."""
        while self._waiting and _takes(self._waiting[0][0]):
            fd, data = self._waiting.popleft()
            # A pipe that takes anything takes so much without blocking us.
            while self._waiting and self._waiting[0][0] == fd and len(data) < select.PIPE_BUF:
                data += self._waiting.popleft()[1]
            try:
                written = os.write(fd, data[: select.PIPE_BUF])
            except BlockingIOError:  # somebody else made it non-blocking
                written = 0
            except OSError as error:
                raise OutputLost(error) from None
            self._size -= written
            if written < len(data):
                self._waiting.appendleft((fd, data[written:]))
            if written == 0:
                return

    def forget(self) -> None:
        """An attempt is over, and nobody wants to see what still waits."""
        self._waiting.clear()
        self._size = 0
        self._errors.clear()

    def first_with(self, error: bytes, name: str) -> str:
        """Who showed this very error first."""
        if len(self._errors) > 1000:  # a job that logs errors all day
            self._errors.clear()
        return self._errors.setdefault(error, name)


def _takes(fd: int, within: float = 0.0) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(within * 1e3))


class Stream:
    """One stream of one process: bytes in, lines out."""

    def __init__(
        self,
        name: str,
        stream: str,
        colour: int,
        screen: Screen,
        shown: bool,
        log: BinaryIO | None,
        echoes: Sequence[str] = (),
    ) -> None:
        self._echoes = echoes  # what the engine says when a peer has gone, see `Plugin.echoes`
        self.last: deque[str] = deque(maxlen=40)  # for the summary
        self._name, self._stream, self._colour = name, stream, colour
        self._screen, self._shown, self._log = screen, shown, log
        self._rest = b""
        self._bar, self._bar_shown = b"", 0.0  # the state of a progress bar that was shown last, and when
        self.trouble = float("-inf")  # when the last traceback began, if nothing was said since
        self._error: list[bytes] = []  # an error that is still being printed
        self._error_begun = 0.0
        self._repeats = False  # the error before was a repetition
        self._farewell: list[bytes] = []  # an error that says that a peer is gone, and when it came
        self._farewell_begun = 0.0
        self._innocent = False  # another process is known to have failed first

    def feed(self, data: bytes) -> None:
        self._write_log(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._whole(line)
        if b"\r" in self._rest:
            # A progress bar draws over itself. Each state as a line of its own would flood the screen.
            drawn, _, rest = self._rest.rpartition(b"\r")
            state, now = _last_state(drawn), time.monotonic()
            if state and now - self._bar_shown >= BAR_EVERY:
                self._bar, self._bar_shown = state, now
                self._line(state)
            self._rest = state + b"\r" + rest
        if len(self._rest) > LONGEST_LINE:
            self._line(self._rest)
            self._rest = b""

    def close(self) -> None:
        if self._rest.strip():
            self._whole(self._rest)
        self._rest = b""
        self._end_error()
        self._show_farewell()

    def another_failed_first(self) -> None:
        self._innocent = True

    def tick(self) -> None:
        """Nothing came for a while: what is kept back may be all there is, as in a dump of the stack."""
        if self._error and time.monotonic() - self._error_begun > ERROR_HELD:
            self._end_error()
        if self._farewell and time.monotonic() - self._farewell_begun > FAREWELL_HELD:
            self._show_farewell()

    def _write_log(self, data: bytes) -> None:
        if self._log is None:
            return
        try:
            self._log.write(data)
            self._log.flush()
        except OSError as error:
            self._log = None
            self._show(f"(its log file cannot be written any more: {error.strerror})".encode())

    def _whole(self, line: bytes) -> None:
        line = line.removesuffix(b"\r")
        text = _last_state(line) if b"\r" in line else line
        if not self._bar or text != self._bar:  # else it was shown while it was drawn
            self._line(text)
        self._bar = b""

    def _line(self, line: bytes) -> None:
        first = not self.last
        self.last.append(line.decode(errors="replace"))
        if self._stream == "stdout":
            self._show(line)
        elif self._error and line[:1] in (b" ", b"\t", b""):
            self._error.append(line)
        elif self._error and _LAST_LINE.match(line):  # "ValueError: …"
            self._error.append(line)
            self._end_error()
        else:
            self._end_error()
            self._outside(line, first)

    def _outside(self, line: bytes, first: bool) -> None:
        """A line of standard error that goes on with no error."""
        if _TRACEBACK.match(line) or (first and _SYNTAX_ERROR.match(line)):
            self.trouble = self._error_begun = time.monotonic()
            self._error.append(line)
        elif _ERROR_IN_ONE_LINE.match(line):
            self._error.append(line)
            self._end_error()
        elif not line or _CHAIN.match(line):
            if self._farewell:
                self._farewell.append(line)
            elif not self._repeats:  # else it joins two tracebacks that are not shown here
                self._show(line)
        else:
            self._show_farewell()
            self._repeats = False
            self.trouble = float("-inf")
            self._show(line)

    def _end_error(self) -> None:
        if not self._error:
            return
        if not self._shown:  # nobody can be referred to it
            self._error = []
            return
        if says_that_a_peer_is_gone([line.decode(errors="replace") for line in self._error], self._echoes):
            self._farewell_begun = self._farewell_begun if self._farewell else time.monotonic()
            self._farewell += self._error
            self._error = []
            return
        self._show_farewell()
        first = self._screen.first_with(b"\n".join(self._error), self._name)
        repeats, self._repeats = self._repeats, first != self._name
        if first == self._name:
            for line in self._error:
                self._show(line)
        elif not repeats:  # else it is the next link of a chain: said already
            self._show(f"(the same error as {first})".encode())
        self._error = []

    def _show_farewell(self) -> None:
        """In full, unless another's failure is known to be the cause; the log file has all of it in any case."""
        lines, self._farewell = self._farewell, []
        if lines and self._innocent:
            last = next(line for line in reversed(lines) if line.strip()).decode(errors="replace")
            lines = [f"(failed because another had: {last if len(last) < 160 else last[:159] + '…'})".encode()]
        for line in lines:
            self._show(line)

    def _show(self, line: bytes) -> None:
        if self._shown:
            self._screen.line(self._stream, self._name, self._colour, line)


def _last_state(line: bytes) -> bytes:
    """What a terminal shows in the end."""
    return next((state for state in reversed(line.split(b"\r")) if state.strip()), b"")


class Output:
    """Both streams of every process of a plan."""

    def __init__(
        self,
        processes: Sequence[Process],
        screen: Screen,
        log_dir: Path | None,
        append: bool,
        master: bool,
        echoes: Sequence[str] = (),
    ) -> None:
        self._logs: list[BinaryIO] = []
        self.streams: list[dict[str, Stream]] = []
        for index, process in enumerate(processes):
            main = process.is_worker and process.rank == 0
            name = "master" if main and master else process.name
            log = None
            if log_dir is not None:
                file = log_dir / f"{process.name.replace(' ', '-')}.log"
                try:
                    log = open(file, "ab" if append else "wb")  # noqa: SIM115
                except OSError as error:
                    raise LaunchError(f"--log-dir: {file}: {error.strerror}") from None
                self._logs.append(log)
            self.streams.append(
                {
                    stream: Stream(name, stream, index, screen, main or not screen.quiet, log, echoes)
                    for stream in ("stdout", "stderr")
                }
            )

    def tick(self) -> None:
        for streams in self.streams:
            streams["stderr"].tick()

    def close(self) -> None:
        for streams in self.streams:
            for stream in streams.values():
                stream.close()
        for log in self._logs:
            with contextlib.suppress(OSError):  # a full disk was told already
                log.close()

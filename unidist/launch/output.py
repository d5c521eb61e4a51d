"""What the processes print: whole lines with a prefix, fewer progress bars, one copy of an error."""

from __future__ import annotations

import contextlib
import re
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from unidist.errors import LaunchError
from unidist.launch.plan import Process
from unidist.launch.report import says_that_a_peer_is_gone
from unidist.launch.screen import Screen

BAR_EVERY = 2.0  # seconds between two shown states of a progress bar
LONGEST_LINE = 1 << 20
ERROR_HELD = 1.0  # seconds that the lines of an error may be kept back, until it is known whether another showed it
FAREWELL_HELD = 5.0  # ... where it says that a peer is gone: the peer's own error should come first

# What is shown once only: a traceback; a syntax error of the script, which comes first and without a heading; or the
# interpreter's own complaint. And how each ends.
_TRACEBACK = re.compile(rb"(  \+ Exception Group )?Traceback \(most recent call last\):")
_SYNTAX_ERROR = re.compile(rb'  File "')
_LAST_LINE = re.compile(rb"[A-Za-z_][\w.]*(: |$)")
_ERROR_IN_ONE_LINE = re.compile(rb"\S*python[\d.]*: (can't open|No module named|Error while finding module)")
_CHAIN = re.compile(rb"(During handling of the above exception|The above exception was the direct cause)")


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
            if state and self._shown and self._screen.live:
                self._screen.bar(self._name, state)
            elif state and now - self._bar_shown >= BAR_EVERY:
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
        if b"\r" in line:
            self._screen.bar(self._name, b"")
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

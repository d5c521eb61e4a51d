"""What the processes print, on one screen: whole lines with a prefix, fewer progress bars, one copy of an error."""

from __future__ import annotations

import os
import re
import select
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from unidist.launch.plan import Process

BAR_EVERY = 2.0  # seconds between two shown states of a progress bar
LONGEST_LINE = 1 << 16
BACKLOG = 1 << 20  # bytes that may wait for a slow reader before the processes have to
_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)
_RESET = b"\x1b[0m"

# A traceback, a syntax error in the script (which comes without the heading), or the interpreter's own complaint.
_ERROR_STARTS = re.compile(rb'Traceback \(most recent call last\):|  File "')
_ERROR_IN_ONE_LINE = re.compile(rb"\S*python[\d.]*: (can't open|No module named|Error while finding module)")
_CHAIN = re.compile(rb"(During handling of the above exception|The above exception was the direct cause)")


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

    def say(self, text: str) -> None:
        """A line of unidist's own, on standard error. This one does wait until it is written."""
        self._put(self._fds["stderr"], f"unidist: {text}\n".encode(errors="replace"))
        self.write(wait=True)

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    @property
    def full(self) -> bool:
        return self._size > BACKLOG

    def _put(self, fd: int, data: bytes) -> None:
        self._waiting.append((fd, data))
        self._size += len(data)
        self.write()

    def write(self, wait: bool = False) -> None:
        """Write what waits, as far as it is taken at once."""
        while self._waiting and (wait or _takes(self._waiting[0][0])):
            fd, data = self._waiting.popleft()
            # A pipe that takes anything takes so much without blocking us.
            written = os.write(fd, data[: select.PIPE_BUF])
            self._size -= written
            if written < len(data):
                self._waiting.appendleft((fd, data[written:]))

    def forget(self) -> None:
        """Nobody wants to see what still waits."""
        self._waiting.clear()
        self._size = 0

    def first_with(self, error: bytes, name: str) -> str:
        """Who showed this very error first."""
        return self._errors.setdefault(error, name)


def _takes(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(0))


class Stream:
    """One stream of one process: bytes in, lines out."""

    def __init__(self, name: str, stream: str, colour: int, screen: Screen, shown: bool, log: BinaryIO | None) -> None:
        self.last: deque[str] = deque(maxlen=40)  # for the summary
        self._name, self._stream, self._colour, self._screen, self._shown, self._log = (
            name,
            stream,
            colour,
            screen,
            shown,
            log,
        )
        self._rest = b""
        self._bar_shown = 0.0
        self.trouble = float("inf")  # when the last traceback began
        self._error: list[bytes] = []  # an error that is still being printed
        self._repeats = False  # the error before was a repetition

    def feed(self, data: bytes) -> None:
        if self._log:
            self._log.write(data)
            self._log.flush()
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._line(line.removesuffix(b"\r").rpartition(b"\r")[2])  # what a terminal would show in the end
        if b"\r" in self._rest:
            # A progress bar draws over itself. Each state as a line of its own would flood the screen.
            *states, self._rest = self._rest.split(b"\r")
            now = time.monotonic()
            if states[-1].strip() and now - self._bar_shown >= BAR_EVERY:
                self._bar_shown = now
                self._line(states[-1])
            self._rest = b"\r" + self._rest
        if len(self._rest) > LONGEST_LINE:
            self._line(self._rest)
            self._rest = b""

    def close(self) -> None:
        if self._rest.strip():
            self._line(self._rest.rpartition(b"\r")[2])
        self._rest = b""
        self._end_error()

    def _line(self, line: bytes) -> None:
        self.last.append(line.decode(errors="replace"))
        if self._stream == "stdout":
            self._show(line)
        elif self._error:
            self._error.append(line)
            if line[:1] not in (b" ", b"\t", b""):  # "ValueError: …" ends it
                self._end_error()
        elif _ERROR_STARTS.match(line):
            self.trouble = time.monotonic()
            self._error.append(line)
        elif _ERROR_IN_ONE_LINE.match(line):
            self._error.append(line)
            self._end_error()
        elif self._repeats and (not line or _CHAIN.match(line)):
            pass  # it joins two tracebacks that are not shown here
        else:
            self._repeats = False
            self._show(line)

    def _end_error(self) -> None:
        if not self._error:
            return
        first = self._screen.first_with(b"\n".join(self._error), self._name)
        repeats, self._repeats = self._repeats, first != self._name
        if first == self._name:
            for line in self._error:
                self._show(line)
        elif not repeats:  # else it is the next link of a chain: said already
            self._show(f"(the same error as {first})".encode())
        self._error = []

    def _show(self, line: bytes) -> None:
        if self._shown:
            self._screen.line(self._stream, self._name, self._colour, line)


class Output:
    """Both streams of every process of a plan."""

    def __init__(
        self, processes: Sequence[Process], screen: Screen, log_dir: Path | None, append: bool, master: bool
    ) -> None:
        self._logs: list[BinaryIO] = []
        self.streams: list[dict[str, Stream]] = []
        for index, process in enumerate(processes):
            main = process.is_worker and process.rank == 0
            name = "master" if main and master else process.name
            log = None
            if log_dir is not None:
                log = open(log_dir / f"{process.name.replace(' ', '-')}.log", "ab" if append else "wb")  # noqa: SIM115
                self._logs.append(log)
            self.streams.append(
                {
                    stream: Stream(name, stream, index, screen, main or not screen.quiet, log)
                    for stream in ("stdout", "stderr")
                }
            )

    def close(self) -> None:
        for streams in self.streams:
            for stream in streams.values():
                stream.close()
        for log in self._logs:
            log.close()

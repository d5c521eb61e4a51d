"""The launcher's own terminal: lines of all processes, and below them one line that tells how far the job is."""

from __future__ import annotations

import contextlib
import os
import re
import select
import time
from collections import deque
from collections.abc import Callable, Sequence

from unidist.control import GAVE_UP, LEFT, Beat

BACKLOG = 1 << 20  # bytes that may wait for a slow reader before the processes have to
BAR_KEPT = 3.0  # seconds for which the bar of one process keeps the place
SPEED_OVER = 10.0  # seconds
_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)
_RESET = b"\x1b[0m"
_CLEAR = b"\r\x1b[K"
_ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


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
        live = os.isatty(err) and os.environ.get("TERM") != "dumb"
        self._terminals = {fd for fd in self._fds.values() if live and os.isatty(fd)}
        self._status, self._drawn = b"", False  # the line below all others, and whether it stands there
        self._bar, self._bar_until = "", 0.0  # the process whose progress bar that is, and for how long
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
    def live(self) -> bool:
        """There is a terminal, on which a line can be drawn again and again."""
        return bool(self._terminals)

    def status(self, text: str) -> None:
        """How far the job is, unless a process draws a progress bar of its own. "" takes the line away."""
        if not text or time.monotonic() > self._bar_until:
            self._draw(text)

    def bar(self, name: str, state: bytes) -> None:
        """A process draws a progress bar, or b"" when it is complete. If several do, the first one is shown."""
        now = time.monotonic()
        if name == self._bar or (state and now > self._bar_until):
            self._bar, self._bar_until = name, now + BAR_KEPT * bool(state)
            self._draw(f"[{name}] {_ESCAPES.sub(b'', state).decode(errors='replace').strip()}" if state else "")

    def _draw(self, text: str) -> None:
        if not self.live:
            return
        with contextlib.suppress(OSError):  # a line that wraps could not be drawn again
            text = text[: (os.get_terminal_size(self._fds["stderr"]).columns or 80) - 1]
        if (drawn := text.encode(errors="replace")) != self._status:
            self._status = drawn
            if not drawn or not self._waiting:  # else it comes with the next line
                self._put(self._fds["stderr"], b"")

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    @property
    def full(self) -> bool:
        return self._size > BACKLOG

    def _put(self, fd: int, data: bytes) -> None:
        if fd in self._terminals:
            data = _CLEAR * self._drawn + data + self._status
            self._drawn = bool(self._status)
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


class Standing:
    """How far a job is, from its heartbeats."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._states: deque[tuple[float, int]] = deque()

    def line(self, workers: Sequence[Beat]) -> str:
        """Of the worker that has made the fewest steps, since the others wait for it. "" before the first step."""
        from unidist.output.progress import duration, scaled

        workers = [beat for beat in workers if beat.operation not in (LEFT, GAVE_UP)]
        last = min(workers, key=lambda beat: beat.step, default=None)
        if last is None or not last.step:
            return ""
        now = time.monotonic()
        self._states.append((now, last.step))
        while now - self._states[0][0] > SPEED_OVER:
            self._states.popleft()
        then, step = self._states[0]
        parts = [f"{len(workers)} worker{'s' * (len(workers) > 1)}", f"step {last.step}"]
        if not last.operation.startswith("step"):
            parts.append(f"in {last.operation}")
        if last.step > step:
            parts.append(f"{scaled((last.step - step) / (now - then))} steps/s")
        return "  ".join([*parts, duration(now - self._begun)])

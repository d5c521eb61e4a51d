"""The progress bar: one line that rewrites itself on a terminal, a plain line now and then where there is none."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, TextIO, TypeVar

from unidist.checks import check_whole
from unidist.output.numbers import check_one, number

# By hand, because every rank pays for the import. After `import unidist`, medians of 7 in turn on one machine: this
# module takes 22 ms of processor time, tqdm 62 ms and rich.progress 181 ms; rich also brings 7 MB with pygments.
REDRAW = 0.2  # seconds, on a terminal
LINE_EVERY = 10.0  # seconds, elsewhere: a log file or the pipe of a launcher
BAR = 24
_WINDOW = 30  # states over which speed is measured

Item = TypeVar("Item")


class Progress:
    """Counts steps and shows them.

        with Progress(len(loader), loader.batch.global_batch, label="epoch 1") as bar:
            for x, y in bar.over(loader):
                bar.show(loss=step(x, y))

    `total_steps` None means unknown: no bar, no time left. `samples_per_step` is that of all ranks. `show` and
    `advance` only keep what they are given; a tensor, or a function without arguments, is turned into a number when a
    line is drawn, so that no step waits for the device. What is shown is this rank's: give a mean over ranks for that.
    With `active=False`, on all ranks but the first, everything is free and silent.
    """

    def __init__(
        self,
        total_steps: int | None = None,
        samples_per_step: int = 0,
        *,
        label: str = "",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        active: bool = True,
    ) -> None:
        for name, value in (("total_steps", total_steps), ("samples_per_step", samples_per_step)):
            if value is not None:
                check_whole(name, value, 0)
        self._total, self._per_step, self._label = total_steps, samples_per_step, label
        self._stream = sys.stderr if stream is None else stream
        self._clock, self._active = clock, active
        self._terminal = active and _is_terminal(self._stream)
        self._values: dict[str, Any] = {}
        self._drawn = False  # our line is the one that the cursor stands on
        self.steps = 0
        self.samples = 0
        self._begin = self._now = clock()
        self._next = self._begin + (REDRAW if self._terminal else 1.0)
        self._states: deque[tuple[float, int, int]] = deque([(self._begin, 0, 0)], maxlen=_WINDOW)

    def over(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items, each counted when the loop comes back for the next; closed at the end, also after a break."""
        try:
            for item in items:
                yield item
                self.advance()
        finally:
            self.close()

    def show(self, **values: Any) -> None:
        """What stands beside the bar from now on: `show(loss=loss, accuracy=lambda: hits / seen)`."""
        for name, value in values.items():
            check_one(name, value)
        if self._active:
            self._values.update(values)

    def advance(self, loss: Any = None, *, steps: int = 1, samples: int | None = None) -> None:
        """Count a step. `samples` is for a step that has not the usual number."""
        if loss is not None:
            self.show(loss=loss)
        if not self._active:
            return
        self.steps += steps
        self.samples += self._per_step * steps if samples is None else samples
        self._now = self._clock()
        if self._now >= self._next:
            self._draw()
            # Lines are close together in the first seconds, for the impatient, then far apart.
            pause = REDRAW if self._terminal else min(LINE_EVERY, self._now - self._begin)
            self._next = self._now + pause

    def clear(self) -> None:
        """Take the bar off the terminal, so that another line can be printed. The next step brings it back."""
        if self._drawn:
            self._put("\r\x1b[K")
            self._drawn, self._next = False, 0.0

    def close(self) -> None:
        """Draw the last state and leave the line. Calling it again does nothing."""
        if self._active:
            self._now = self._clock()
            self._states = deque([(self._begin, 0, 0)], maxlen=_WINDOW)  # the speed of the whole, at the end
            if self.steps:
                self._draw(last=True)
            self._active = False
        self._values.clear()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _draw(self, last: bool = False) -> None:
        line = self._line(last)
        self._states.append((self._now, self.steps, self.samples))
        if self._terminal:
            with contextlib.suppress(OSError, ValueError):
                # Of this stream's terminal; a line that wraps could not be rewritten.
                line = line[: os.get_terminal_size(self._stream.fileno()).columns - 1]
            self._put(f"\r{line}\x1b[K" + ("\n" if last else ""))
            self._drawn = not last
        else:
            self._put(line + "\n")  # one write: lines of several processes do not mix

    def _line(self, last: bool) -> str:
        begin, steps_then, samples_then = self._states[0]
        seconds = max(self._now - begin, 1e-9)
        parts = [self._label] if self._label else []
        if self._total:
            done = min(self.steps / self._total, 1.0)
            if self._terminal:
                parts.append(f"[{'=' * int(BAR * done):{BAR}}]")
            parts.append(f"{int(100 * done):3d}%")
            parts.append(f"{self.steps}/{self._total}")
        else:
            parts.append(f"{self.steps} steps")
        parts += [f"{name} {_short(name, value)}" for name, value in self._values.items()]
        if self.samples:
            parts.append(f"{scaled((self.samples - samples_then) / seconds)} samples/s")
        else:
            parts.append(f"{scaled((self.steps - steps_then) / seconds)} steps/s")
        if last:
            parts.append(f"in {duration(self._now - self._begin)}")
        elif self._total and self.steps > steps_then:
            left = max(self._total - self.steps, 0) * seconds / (self.steps - steps_then)
            parts.append(f"{duration(left)} left")
        return "  ".join(parts)

    def _put(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # a terminal that was closed must not end the training
            self._active = False


def _is_terminal(stream: TextIO) -> bool:
    try:
        if stream is sys.stderr and os.environ.get("UNIDIST_TERMINAL"):
            return True  # the launcher has one, and draws our line there
        return stream.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:  # closed
        return False


def _short(name: str, value: Any) -> str:
    shown = number(name, value)
    return str(shown) if isinstance(shown, int) else f"{shown:.4g}"


def scaled(rate: float) -> str:
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if rate >= factor:
            return f"{rate / factor:.3g}{unit}"
    return f"{rate:.3g}"


def duration(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"

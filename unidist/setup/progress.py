"""Tells a waiting person what is done and for how long: one rewritten line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO

SPINNER = "|/-\\"
PLAIN_EVERY = 30.0  # seconds between two signs of life where a line cannot be rewritten


class Progress:
    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._label = ""
        self._begun = self._said = 0.0
        self._turn = 0

    def say(self, text: str) -> None:
        self._clear()
        print(text, file=self._stream, flush=True)

    def begin(self, label: str) -> None:
        self._label, self._begun = label, time.monotonic()
        self._said = self._begun
        if not self._live:
            self.say(f"{label} …")

    def tick(self, detail: str = "") -> None:
        """A sign of life; `detail` is what the step printed last."""
        now = time.monotonic()
        if self._live:
            self._turn += 1
            line = f"{SPINNER[self._turn % len(SPINNER)]} {self._label} … {_duration(now - self._begun)}  {detail}"
            width = shutil.get_terminal_size().columns - 1
            self._stream.write(f"\r\x1b[K{line[:width]}")
            self._stream.flush()
        elif now - self._said >= PLAIN_EVERY:
            self._said = now
            self.say(f"{self._label} … {_duration(now - self._begun)}")

    def done(self, how: str = "done") -> None:
        self.say(f"{self._label}: {how} in {_duration(time.monotonic() - self._begun)}")

    def _clear(self) -> None:
        if self._live:
            self._stream.write("\r\x1b[K")


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"

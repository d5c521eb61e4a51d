"""How a process ends: OneFlow's own way out waits for the other ranks, which after a failure may never come."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


class Leaving:
    """From `install` on, an uncaught exception is printed and ends the process at once."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell  # the other ranks, why this one goes
        self._code: int | None = None  # of a failure that is on its way out

    def install(self) -> None:
        show: Hook = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            show(kind, error, trace)
            self.now(130 if issubclass(kind, KeyboardInterrupt) else 1, f"{kind.__name__}: {error}")

        sys.excepthook = hook
        atexit.register(self._at_exit)  # after oneflow's, so it runs before it

    def failed(self) -> None:
        """The Strategy is left by an exception. It may still be caught, or be a sys.exit, which has its own code."""
        error = sys.exc_info()[1]
        self._code = _exit_code(error) if isinstance(error, SystemExit) else 0

    def now(self, code: int, why: str) -> None:
        self._tell(why)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)

    def _at_exit(self) -> None:
        if self._code is not None:
            self.now(self._code, f"it left early, with exit code {self._code}")


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    return 1

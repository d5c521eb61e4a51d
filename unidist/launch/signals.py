"""Signals as events: bytes in a pipe, so that none is lost between two looks."""

from __future__ import annotations

import contextlib
import os
import signal

from unidist.launch import processes as system


class Signals:
    """A context, entered in the main thread, that lasts for all attempts of a job: what stops one must stop the next.

    `fd` can be waited for; `read` then moves what came into `received`. Ended children wake it too.
    """

    def __init__(self) -> None:
        self.received: list[int] = []

    def __enter__(self) -> Signals:
        self.fd, self._writer = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._writer, False)
        numbers = (signal.SIGCHLD, *system.stopping_signals())
        self._before = {number: signal.signal(number, lambda *_: None) for number in numbers}
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)  # whoever forked us may have held them back
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self.fd)
        os.close(self._writer)

    def read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self.received += [number for number in os.read(self.fd, 4096) if number != signal.SIGCHLD]

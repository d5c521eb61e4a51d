"""A bound on the steps that an engine has been told and not done yet."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

WORK = 2.0  # seconds of it that may wait
LEAST, MOST = 4, 256  # steps that may wait, however long they take
# The part of a full queue that is waited for before the engine is told more; the rest keeps it busy meanwhile. Where
# Python and the engine share a core, long turns of each take less time than short ones. Against no bound at all,
# OneFlow took 1.04 times as long with these numbers, 1.10 to 1.19 times with half and a quarter of the work in the
# queue, and 1.40 times with 16 steps, as a loop does that reads each loss (one run with all of them in turn).
DRAINED = 1 / 2


class Pace:
    """An engine that works in the background queues whatever it is told, and a loop that reads no losses would tell it
    the whole training: its batches fill the memory, and nobody sees whether anything is done. Updates are made in
    order, so when a loss is there, those of the steps before it have been made."""

    def __init__(self, wait_for: Callable[[list[Any]], object]) -> None:
        self._wait_for = wait_for
        self._waiting: deque[Any] = deque()  # the losses of these steps
        self._most = LEAST
        self._since = time.monotonic()

    def __len__(self) -> int:
        return len(self._waiting)

    def told(self, loss: Any) -> None:
        """The engine was told a step, of which this is the loss."""
        self._waiting.append(loss)

    def keep(self) -> None:
        """Before the next step, of which nothing is done yet when the wait is interrupted: wait, where too many are in
        the queue."""
        if len(self._waiting) < self._most:
            return
        oldest = [self._waiting.popleft() for _ in range(int(self._most * DRAINED))]
        self._wait_for(oldest)
        now = time.monotonic()
        self._most = max(LEAST, min(MOST, int(WORK / max(now - self._since, 1e-6) * len(oldest))))
        self._since = now

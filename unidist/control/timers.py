"""Functions that the control server calls at their time."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable


class Timers:
    """Functions to call at a time. Those that were cancelled are swept out when they are many."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, list[Callable[[], None] | None]]] = []
        self._count = itertools.count()
        self._cancelled = 0

    def later(self, after: float, call: Callable[[], None]) -> Callable[[], None]:
        slot: list[Callable[[], None] | None] = [call]
        heapq.heappush(self._heap, (time.monotonic() + after, next(self._count), slot))

        def cancel() -> None:
            if slot[0] is not None:
                slot[0] = None
                self._cancelled += 1
                if self._cancelled > 100 + len(self._heap) // 2:
                    self._heap = [timer for timer in self._heap if timer[2][0] is not None]
                    heapq.heapify(self._heap)
                    self._cancelled = 0

        return cancel

    def run(self) -> float:
        """Call those whose time has come; seconds until the next."""
        while self._heap:
            wait = self._heap[0][0] - time.monotonic()
            if wait > 0:
                return min(wait, 60.0)
            _, _, slot = heapq.heappop(self._heap)
            call, slot[0] = slot[0], None
            if call is None:
                self._cancelled -= 1
            else:
                call()
        return 60.0

"""Heartbeats: where this process is, told to the control server every now and then."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from unidist.control.calls import KEPT, SHOWN
from unidist.control.causes import LEFT
from unidist.control.client import MAX_OPERATION, Control
from unidist.errors import CommunicationError


class Place(NamedTuple):
    """How far a process has come among the operations of all ranks."""

    together: int = 0  # how many it has begun
    inside: bool = False  # it has not finished the last of them


class Heart:
    """Tells the control server where this process is, every `interval` seconds, from a thread of its own.

    The main thread only stores attributes. A server that went away does not end the training.
    """

    def __init__(self, control: Control, rank: int, role: str = "worker", interval: float = 1.0) -> None:
        self._control, self._rank, self._role, self._interval = control, rank, role, interval
        # Operation, step that was begun, how often we got on, operations of all ranks; the first is the engine's start.
        self._at = ("start-up", 0, 0, 1)
        # The last operations of all ranks that are no steps, by number. One is noted before `_at` tells of it: what is
        # not noted, up to the number there, is a step.
        self._calls: deque[tuple[int, str]] = deque([(1, "start-up")], KEPT)
        self._went_on = False  # after an error had left a step, and has finished nothing since
        self._pauses = self._waits = 0
        self._stepping = True  # inside a step, or that start
        self._queued = False  # what it did last is a step, and the engine may still be at it
        self._skipped = False  # an error has left that step
        self._broke_off = False  # an error has left another operation, and none was begun since
        self._how = LEFT
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="unidist-heart", daemon=True)

    def start(self) -> Heart:
        self._thread.start()
        return self

    def stop(self, how: str = LEFT) -> None:
        self._how = how
        self._stop.set()
        # A server that hangs may keep the thread in its last call; it is a daemon, and may be left behind.
        self._thread.join(timeout=2)

    def __enter__(self) -> Heart:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def at(self, operation: str, step: int, together: bool = True, training: bool = False, call: str = "") -> None:
        """`operation` is about to begin, after `step` updates. `together`: all ranks take part in it. `training`: it is
        a step, which an engine may only queue, so that this process waits for the others when it reads a result.
        `call` is what the operation must be called on every rank."""
        _, _, moves, number = self._at
        if self._skipped:
            # The script goes on with something else in its place. It counts until then: who leaves the Strategy for
            # good has broken off what others are in.
            number -= 1
            self._went_on = True
            self._skipped = self._stepping = False
        if together and not training:
            self._calls.append((number + 1, (call or operation)[:SHOWN]))
        self._at = (operation, step, moves + 1, number + together)
        self._stepping |= together and training
        self._queued = training
        self._broke_off = False

    def stepped(self) -> None:
        """This process has done its part of the step, or of the engine's start."""
        self._stepping = self._went_on = False

    def left_step(self) -> None:
        """An error has left the step, if one of all ranks was begun. The script may catch it, and skip the batch."""
        self._skipped = self._stepping

    @property
    def place(self) -> Place:
        return Place(self._at[3], self._stepping or self._broke_off or self._waits > 0)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """For a stretch inside an operation that needs the other ranks."""
        self._waits += 1
        try:
            yield
            self._went_on = False
        except BaseException:
            self._broke_off = True
            raise
        finally:
            self._waits -= 1

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """For a stretch in which no progress is to be expected, such as writing a large file."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    def _beat(self) -> None:
        while True:
            operation, step, moves, together = self._at
            calls = list(self._calls.copy())
            with contextlib.suppress(CommunicationError):  # the next may get through again
                self._control.tell(
                    "beat",
                    role=self._role,
                    rank=self._rank,
                    step=step,
                    operation=operation[:MAX_OPERATION],
                    moves=moves,
                    paused=self._pauses > 0,
                    waits=self._waits > 0,
                    together=together,
                    inside=self.place.inside or self._queued,
                    calls=calls,
                    skipped=self._went_on,
                )
            if self._stop.wait(self._interval):
                break
        with contextlib.suppress(CommunicationError):
            self._control.leave(self._role, self._rank, self._how)

"""What happens beside the engine during a Strategy's life: the ranks meet, heartbeats tell where each is, a lifeline
carries the cause of a failure, and in debug mode (UNIDIST_DEBUG=1) all ranks agree before each collective.

A process that is alone and has no launcher pays for none of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from unidist.errors import RanksDisagree, UsageError

if TYPE_CHECKING:
    from unidist.backend import Backend
    from unidist.collectives import Collectives
    from unidist.control import Control, Heart
    from unidist.control.company import Company
    from unidist.control.lifeline import Lifeline
    from unidist.control.meeting import Meeting
    from unidist.control.peers import Peers
    from unidist.world import World

# Seconds that a rank may come later than the others to a collective, in debug mode; and in main_first and the like.
PATIENCE, LONG_PATIENCE = 300.0, 3600.0
WEEK = 7 * 24 * 3600.0  # where a rank may have much to do when the others are here; one that never comes is found out


def debugging() -> bool:
    value = os.environ.get("UNIDIST_DEBUG", "").lower()
    if value not in ("", "0", "1", "false", "true"):
        raise UsageError(f"UNIDIST_DEBUG is {value!r}, it must be 1 or 0")
    return value in ("1", "true")


class Watch:
    """Begins before the engine does. `meet` before the engine starts, `attach` when it is up, `close` at the end.

    `same` is what all ranks must have in common; `company` comes to the meeting beside them.
    """

    def __init__(self, world: World, same: Mapping[str, str], timeout: float, company: Company | None = None) -> None:
        self._world = world
        self._meeting: Meeting | None = None
        self._control: Control | None = None
        self._heart: Heart | None = None
        self._lifeline: Lifeline | None = None
        self.checking = debugging()
        self._sequence = self._updates = self._gathered = 0
        self._paused: list[str] = []  # the long operations that this rank is in
        launched = bool(os.environ.get("UNIDIST_CONTROL"))  # empty where each node has a launcher of its own
        at_launcher = launched and world.source == "unidist"
        several = world.world_size > 1 or company is not None
        if launched and (not several or not at_launcher):
            from unidist.control import connect_from_env

            self._begin(connect_from_env())
        if several:
            from unidist.control.meeting import Meeting

            self._meeting = Meeting(world, same, timeout, company)

    def _begin(self, control: Control | None) -> None:
        from unidist.control import Heart

        assert control is not None
        self._control = control
        # The launcher's number of this process, which may have been given another rank by hand.
        launcher = bool(os.environ.get("UNIDIST_CONTROL"))
        number = int(os.environ.get("UNIDIST_RANK", self._world.rank)) if launcher else self._world.rank
        self._heart = Heart(control, number, interval=1.0 + self._world.world_size / 1024).start()

    def meet(self) -> World:
        """The world as the ranks have met; raises on all of them when something does not fit."""
        if self._meeting is not None:
            self._world = self._meeting.complete()
            if self._world.peers is not None:
                self._watch_over(self._world.peers)
        return self._world

    def _watch_over(self, peers: Peers) -> None:
        from unidist.control.heartbeat import Place
        from unidist.control.lifeline import Lifeline

        role, host = self._world.role, peers.control.host
        if self._heart is None and role == "worker":  # a service has no steps to tell of
            self._begin(peers.control)
        heart = self._heart
        place = (lambda: heart.place) if heart is not None else Place
        self._lifeline = Lifeline(peers.control, role, peers.rank, host, peers.launched, place).start()

    def attach(self, backend: Backend) -> None:
        from unidist.collectives import Collectives

        self._world = backend.world  # an engine may have numbered the ranks itself
        if self._lifeline is None and self._world.peers is not None:  # they met only after the engine had started
            self._watch_over(self._world.peers)
        if self._lifeline is not None:
            self._lifeline.engine_is_up(self._world.rank)
        if self._heart is not None:
            self._heart.stepped()
        self.collectives: Collectives = Collectives(backend, self.within if self._heart else None)

    def before(self, name: str, signature: str = "", training: bool = False) -> None:
        """An operation of all ranks is about to start. Its name is the same on all of them, its signature should be."""
        if self._heart is None:
            return
        operation = f"{name} {signature}" if signature else name
        call = next((whole for whole in self._paused if whole in ("save", "load")), name)  # what the user has called
        self._heart.at(": ".join([*self._paused, operation]), self._updates, training=training, call=call)
        self._sequence += 1
        if self.checking and self._world.peers is not None:
            from unidist.control import agree

            timeout = LONG_PATIENCE if self._paused else PATIENCE
            peers = self._world.peers
            with self._heart.waiting():
                agree(peers.control, self._sequence, self._world.rank, peers.size, operation, timeout, peers.scope)

    @contextmanager
    def within(self, name: str, signature: str = "") -> Iterator[None]:
        """Inside, this rank may have to wait for the others."""
        self.before(name, signature)
        with self._heart.waiting() if self._heart else nullcontext():
            yield

    def gather(self, topic: str, value: Any) -> list[Any]:
        """What each rank says to this topic, in JSON, outside of the engine."""
        peers = self._world.peers
        if peers is None:
            return [value]
        self._gathered += 1
        with self.within("gather"):
            told = peers.gather(f"gathered {self._gathered}", {"topic": topic, "value": value}, WEEK)
        if any(answer["topic"] != topic for answer in told):
            topics = ", ".join(f"{answer['topic']} on rank {rank}" for rank, answer in enumerate(told[:8]))
            raise RanksDisagree(
                f"the ranks are not at the same point of what they do together ({topics}): one of them was interrupted "
                "there. Let the error end the job on every rank, and resume from the last checkpoint"
            )
        return [answer["value"] for answer in told]

    def leaving(self) -> AbstractContextManager[None]:
        """Inside, this rank waits for the others to close their Strategy, too."""
        if self._heart is None:
            return nullcontext()
        from unidist.control.roll import LEAVE

        return self.within(LEAVE)

    def step(self, number: int, exchanges: bool, closes: bool) -> None:
        """A training step is about to start; `number` updates were made before it. It exchanges gradients with the
        other ranks when it closes its group of micro-batches."""
        self._updates = number
        if self._heart is not None:
            if self.checking and exchanges:
                self.before(f"step {number}", training=True)
            else:
                self._heart.at("step", number, together=exchanges and closes, training=True)

    @property
    def made(self) -> int:
        """Operations of all ranks that this one has begun."""
        return 0 if self._heart is None else self._heart.place.together

    def stepped(self) -> None:
        """The step is done, or queued."""
        if self._heart is not None:
            self._heart.stepped()

    def left_step(self) -> None:
        """An error has left it."""
        if self._heart is not None:
            self._heart.left_step()

    @contextmanager
    def paused(self, what: str) -> Iterator[None]:
        """Inside, no progress is expected, except where this rank waits for others."""
        self._paused.append(what)
        try:
            with self._heart.pause() if self._heart else nullcontext():
                yield
        finally:
            self._paused.pop()

    def failed(self, error: BaseException) -> None:
        """An error leaves the Strategy: the others are to hear why, before the engine's connections close."""
        if self._lifeline is not None:
            self._lifeline.gives_up(error)

    def close(self, failed: bool = False) -> None:
        if self._heart is not None:
            from unidist.control import GAVE_UP, LEFT

            self._heart.stop(GAVE_UP if failed else LEFT)
        if self._lifeline is None:
            if self._meeting is not None:
                self._meeting.abandon()
        elif not failed:
            self._lifeline.close()
        # After a failure the connection stays to the end of the process, which may fail for good, or not.
        if self._control is not None and (self._lifeline is None or not failed):
            self._control.close()
        peers = self._world.peers
        if peers is not None and not failed:
            peers.control.close()
        if peers is not None and peers.host is not None:
            peers.host.release() if failed else peers.host.close()

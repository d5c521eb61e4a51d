"""Heartbeats for the launcher and, in debug mode, the check that all ranks agree before each collective.

Under `unidist run` the control plane is beside the launcher. Otherwise rank 0 brings one up, but only for
UNIDIST_DEBUG=1: without either, nothing here costs anything.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from unidist.errors import UsageError

if TYPE_CHECKING:
    from unidist.backend import Backend
    from unidist.collectives import Collectives
    from unidist.control import Control, ControlServer, Heart
    from unidist.world import World

# Seconds that a rank may come later than the others to a collective, in debug mode; and in main_first and the like.
PATIENCE, LONG_PATIENCE = 300.0, 3600.0


def debugging() -> bool:
    value = os.environ.get("UNIDIST_DEBUG", "").lower()
    if value not in ("", "0", "1", "false", "true"):
        raise UsageError(f"UNIDIST_DEBUG is {value!r}, it must be 1 or 0")
    return value in ("1", "true")


class Watch:
    """Begins before the engine does, so that a rank that does not come is missed; `attach` when it is up."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._server: ControlServer | None = None
        self._control: Control | None = None
        self._heart: Heart | None = None
        self._checking = debugging()
        self._lockstep = True
        self._sequence = self._updates = 0
        self._paused = 0
        if os.environ.get("UNIDIST_CONTROL"):  # empty where each node has a launcher of its own
            from unidist.control import connect_from_env

            control = connect_from_env()
            assert control is not None
            # The launcher's number of this process, which may have been given another rank by hand.
            self._begin(control, int(os.environ.get("UNIDIST_RANK", world.rank)))

    def _begin(self, control: Control, number: int) -> None:
        from unidist.control import Heart

        self._control, self._heart = control, Heart(control, number).start()

    def attach(self, backend: Backend) -> None:
        self._world = backend.world  # an engine may have numbered the ranks itself
        self._lockstep = backend.capabilities.lockstep is True
        if self._heart is None and self._checking and self._world.world_size > 1:
            self._begin(self._host(backend), self._world.rank)
        from unidist.collectives import Collectives

        self.collectives: Collectives = Collectives(backend, self.before if self._heart else None)

    def _host(self, backend: Backend) -> Control:
        """No launcher of ours: rank 0 runs the control plane and tells the others through the engine."""
        import numpy as np

        from unidist.control import Control, ControlServer

        card = np.zeros(512, dtype=np.uint8)
        if self._world.rank == 0:
            self._server = ControlServer(own_interface(self._world)).start()
            said = json.dumps([self._server.url, self._server.token]).encode()
            card[: len(said)] = np.frombuffer(said, dtype=np.uint8)
        heard = backend.to_numpy(backend.broadcast(backend.from_numpy(card), 0)).tobytes().rstrip(b"\0")
        return Control(*json.loads(heard))

    def before(self, operation: str) -> None:
        """A collective is about to start."""
        if self._heart is None:
            return
        self._heart.at(operation, self._updates)
        self._sequence += 1
        if self._checking and self._world.world_size > 1 and self._control is not None:
            from unidist.control import agree

            timeout = LONG_PATIENCE if self._paused else PATIENCE
            agree(self._control, self._sequence, self._world.rank, self._world.world_size, operation, timeout)

    def step(self, number: int) -> None:
        """A training step is about to start; `number` updates were made before it."""
        self._updates = number
        if self._heart is not None:
            checked = self._checking and self._lockstep
            self.before(f"step {number}") if checked else self._heart.at("step", number)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, no progress is expected."""
        self._paused += 1
        try:
            with self._heart.pause() if self._heart else nullcontext():
                yield
        finally:
            self._paused -= 1

    def close(self, failed: bool = False) -> None:
        if self._heart is not None:
            from unidist.control import GAVE_UP, LEFT

            self._heart.stop(GAVE_UP if failed else LEFT)
        if self._control is not None:
            self._control.close()
        if self._server is not None:
            self._server.close()


def own_interface(world: World) -> str:
    """The address of this host on which the other ranks know it, and no other."""
    import socket

    known = socket.gethostbyname(world.master_addr or "127.0.0.1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((known, 9))  # sends nothing: it only asks the kernel which interface leads there
        return str(probe.getsockname()[0])

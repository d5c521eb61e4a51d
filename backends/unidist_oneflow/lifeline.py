"""Ends this process, with the cause, when another rank is gone. OneFlow itself would abort with a C++ stack, or hang.

Used where no launcher of ours watches all ranks: on several nodes, or when something else started the processes.
"""

from __future__ import annotations

import os
import selectors
import sys
import threading
from collections.abc import Mapping, Sequence

from unidist.world import World
from unidist_oneflow.preflight import Facts
from unidist_oneflow.wire import Wire


class Lifeline:
    """Connections that live as long as the ranks. Rank 0 holds one to each and passes on who is gone, and why."""

    def __init__(self, world: World, wires: Mapping[int, Wire], everyone: Sequence[Facts]) -> None:
        self._world, self._wires = world, dict(wires)
        self._names = [f"rank {rank} on {facts['host']}" for rank, facts in enumerate(everyone)]
        self._closing = threading.Event()
        if self._wires:
            threading.Thread(target=self._watch, name="unidist-lifeline", daemon=True).start()

    def tell(self, why: str) -> None:
        """This rank is about to go."""
        self._closing.set()
        if self._world.rank == 0:
            self._pass_on(f"{self._names[0]}: {why}")
        elif 0 in self._wires:
            self._wires[0].send({"why": why})

    def close(self) -> None:
        """All ranks have agreed to part."""
        self._closing.set()
        for wire in self._wires.values():
            wire.send({"bye": True})

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, wire in self._wires.items():
                selector.register(wire, selectors.EVENT_READ, rank)
            while selector.get_map():
                for key, _ in selector.select():
                    if not self._hear(key.data):
                        selector.unregister(key.fileobj)

    def _hear(self, rank: int) -> bool:
        """Take in what this rank has sent; False when nothing more is to be expected of it."""
        wire, why = self._wires[rank], "it died, or its host cannot be reached"
        while True:
            try:
                message = wire.receive(5.0)
            except (TimeoutError, ValueError):
                message = None
            if message is not None and "bye" in message:
                return False
            if message is not None and "gone" in message:
                self._end(message["gone"])
            if message is None or "why" in message:
                self._end(f"{self._names[rank]}: {message['why'] if message else why}")
                return False
            if not wire.has_more:
                return True

    def _end(self, cause: str) -> None:
        if self._closing.is_set():
            return
        if self._world.rank == 0:
            self._pass_on(cause)
        sys.stderr.write(f"unidist: PeerFailed: this process ends because another one is gone: {cause}\n")
        sys.stderr.flush()
        os._exit(1)

    def _pass_on(self, cause: str) -> None:
        for wire in self._wires.values():
            wire.send({"gone": cause})

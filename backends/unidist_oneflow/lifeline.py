"""Ends this process, with the cause, when another rank is gone. OneFlow itself would abort with a C++ stack, or hang.

Used where no launcher of ours watches all ranks: on several nodes, or when something else started the processes.
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from unidist.world import World
from unidist_oneflow.preflight import Facts
from unidist_oneflow.wire import Wire


class Lifeline:
    """Connections that live as long as the ranks. Rank 0 holds one to each and passes on who is gone, and why."""

    def __init__(self, world: World, wires: Mapping[int, Wire], everyone: Sequence[Facts]) -> None:
        self._world, self._wires = world, dict(wires)
        self._names = [f"rank {rank} on {facts['host']}" for rank, facts in enumerate(everyone)]
        self._closing = threading.Event()
        self._die = partial(os._exit, 1)

    def start(self) -> None:
        if self._wires:
            threading.Thread(target=self._watch, name="unidist-lifeline", daemon=True).start()

    @contextmanager
    def by_another_process(self, timeout: float) -> Iterator[None]:
        """While OneFlow starts, it holds the interpreter's lock and waits for all ranks: no thread could end it."""
        parent = os.getpid()
        done, over = os.pipe()
        guard = os.fork()
        if guard == 0:
            try:
                os.close(over)
                self._die = partial(_end_both, parent)
                self._watch(done, timeout)
            finally:
                os._exit(0)
        os.close(done)
        try:
            yield
        finally:
            os.close(over)
            os.waitpid(guard, 0)

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

    def _watch(self, done: int | None = None, timeout: float | None = None) -> None:
        """Until all have said goodbye, or somebody closes the other end of `done`."""
        until = None if timeout is None else time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            if done is not None:
                selector.register(done, selectors.EVENT_READ)
            for rank, wire in self._wires.items():
                selector.register(wire, selectors.EVENT_READ, rank)
            while selector.get_map():
                ready = selector.select(until and max(0.0, until - time.monotonic()))
                if not ready:
                    late = f"OneFlow has not started within {timeout:g} s, though all ranks have met"
                    self._end(f"{self._names[self._world.rank]}: {late}", "CommunicationError")
                for key, _ in ready:
                    if key.fileobj is done:
                        return
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

    def _end(self, cause: str, what: str = "PeerFailed: this process ends because another one is gone") -> None:
        if self._closing.is_set():
            return
        if self._world.rank == 0:
            self._pass_on(cause)
        sys.stderr.write(f"unidist: {what}: {cause}\n")
        sys.stderr.flush()
        self._die()

    def _pass_on(self, cause: str) -> None:
        for wire in self._wires.values():
            wire.send({"gone": cause})


def _end_both(parent: int) -> None:
    os.kill(parent, signal.SIGKILL)
    os._exit(1)

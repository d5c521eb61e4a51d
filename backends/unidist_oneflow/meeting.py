"""The ranks meet on ctrl_port before OneFlow does, because OneFlow waits for ever where something does not fit.

Rank 0 listens, every other rank tells it what it knows (`facts`), and all hear the verdict: everyone's facts, or what
is wrong, where. On several hosts each then tries whether it can reach the others on a port that is not ctrl_port. Then
the port is given to OneFlow; the connections stay, as the ranks' lifelines (see `lifeline`).
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from unidist.errors import CommunicationError, RanksDisagree, RanksMissing, UnidistError, WorldError
from unidist.launch.ports import holder
from unidist.world import World
from unidist_oneflow import preflight
from unidist_oneflow.machines import is_own
from unidist_oneflow.preflight import Facts
from unidist_oneflow.wire import Wire

PROBLEMS = (CommunicationError, RanksDisagree, RanksMissing)
NOTICE = 5.0  # seconds of waiting after which a person is told what for


class Meeting:
    """Holds the connections: rank -> Wire on rank 0, only {0: Wire} elsewhere."""

    def __init__(self, world: World, machine: Sequence[str] | None, facts: Facts, timeout: float) -> None:
        self._world, self._machine, self._facts, self._timeout = world, machine, facts, timeout
        self._until = time.monotonic() + timeout
        self._notice = time.monotonic() + NOTICE
        self.everyone: list[Facts] = [facts]
        self.wires: dict[int, Wire] = {}
        self._where = f"{world.master_addr}:{world.master_port}"
        if world.world_size > 1:
            with preflight.open_door() as door:
                facts["door"] = door.getsockname()[1]
                self._host() if world.rank == 0 else self._visit()

    # -- rank 0 ------------------------------------------------------------------------------------------------

    def _host(self) -> None:
        came: dict[int, Facts] = {0: self._facts}
        strangers: list[Wire] = []
        with self._listen() as listener, selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ, None)
            next_look = time.monotonic() + 1.0
            while len(came) < self._world.world_size:
                for key, _ in selector.select(0.2):
                    if key.data is None:
                        wire = Wire(listener.accept()[0])
                        strangers.append(wire)
                        selector.register(wire, selectors.EVENT_READ, wire)
                    else:
                        selector.unregister(key.data)
                        self._greet(key.data, came)
                now = time.monotonic()
                if now > next_look and self._machine:
                    self._look_for_other_masters()
                    next_look = now + 2.0
                self._say_once(f"rank 0 waits on {self._where} for {self._missing(came)}")
                if now > self._until:
                    self._call_off(
                        RanksMissing,
                        f"{self._missing(came)} did not come to {self._where} within {self._timeout:g} s: is the same "
                        "script running there, with the same list of machines? Can it reach this host's port "
                        "(firewall, container started without --net=host)?",
                    )
        for wire in strangers:
            if wire not in self.wires.values():
                wire.close()
        self.everyone = [came[rank] for rank in range(self._world.world_size)]
        self._tell_all({"everyone": self.everyone})
        if preflight.several_hosts(self.everyone):
            self._hear_about_doors()

    def _hear_about_doors(self) -> None:
        closed = [preflight.closed_door(self.everyone, 0)]
        for wire in self.wires.values():
            try:
                closed.append((wire.receive(self._timeout) or {}).get("closed"))
            except (TimeoutError, ValueError):
                closed.append(None)  # OneFlow's start, or the lifeline, will tell
        if any(closed):
            self._call_off(CommunicationError, next(filter(None, closed)))
        self._tell_all({"go": True})

    def _listen(self) -> socket.socket:
        port = self._world.master_port or 0
        # In a container with mapped ports, the address that others know is not one of its own.
        host = str(self._world.master_addr) if is_own(str(self._world.master_addr)) else ""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(512)
        except OSError as error:
            listener.close()
            who = f": {holder(port)}" if error.errno == errno.EADDRINUSE else ""
            raise WorldError(
                f"rank 0 cannot listen on {self._where} ({error.strerror}){who}. Choose another ctrl_port, the same on "
                "every node."
            ) from None
        return listener

    def _greet(self, wire: Wire, came: dict[int, Facts]) -> None:
        try:
            hello = wire.receive(5.0)
        except (TimeoutError, ValueError):
            hello = None
        if hello is None or set(hello) not in ({"look", "host"}, {"rank", "facts"}):
            return wire.close()  # somebody scans ports
        if "look" in hello:  # another node takes itself for the master
            wire.send({"machine": list(self._machine or ())})
            wire.close()
            return self._compare_lists(hello["look"], hello["host"])
        rank, facts = hello["rank"], hello["facts"]
        if rank in self.wires or rank == 0:
            where = f"{came[rank]['host']} and {facts['host']}"
            problem = f"two processes say they are rank {rank}, on {where}: give each its own"
            self.wires[self._world.world_size] = wire  # it has to hear that too
        else:
            self.wires[rank] = wire
            came[rank] = {**facts, "address": wire.peer}  # OneFlow will look for it there, too
            problem = preflight.difference(self._facts, facts, rank)
        if problem:
            self._call_off(RanksDisagree, problem)

    def _look_for_other_masters(self) -> None:
        """A node whose list has another order may think that it is the master too: then both would wait."""
        for address in (self._machine or ())[1:]:
            try:
                wire = Wire(socket.create_connection((address, self._world.master_port), 0.3))
                wire.send({"look": list(self._machine or ()), "host": self._facts["host"]})
                answer = wire.receive(1.0)
                wire.close()
            except (OSError, ValueError):
                continue
            self._compare_lists((answer or {}).get("machine"), address)

    def _compare_lists(self, theirs: list[str] | None, where: str) -> None:
        if theirs and theirs != list(self._machine or ()):
            raise RanksDisagree(
                f"the list of machines differs between nodes: here {', '.join(self._machine or ())}, on {where} "
                f"{', '.join(theirs)}. Both take themselves for the master, so give every node the same list."
            )

    def _missing(self, came: dict[int, Facts]) -> str:
        missing = [rank for rank in range(self._world.world_size) if rank not in came]
        per_node = max(1, self._world.local_world_size)
        named = [
            f"rank {rank}" + (f" ({self._machine[rank // per_node]})" if self._machine else "") for rank in missing
        ]
        return ", ".join(named[:8]) + (f" and {len(named) - 8} more" if len(named) > 8 else "")

    def _call_off(self, kind: type[UnidistError], problem: str) -> NoReturn:
        self._tell_all({"problem": problem, "kind": kind.__name__})
        raise kind(problem)

    def _tell_all(self, message: dict[str, Any]) -> None:
        for wire in self.wires.values():
            wire.send(message)

    # -- the others --------------------------------------------------------------------------------------------

    def _visit(self) -> None:
        wire = self._connect()
        answer = self._answer(wire)
        self._raise_problem(answer)
        self.everyone, self.wires = answer["everyone"], {0: wire}
        if preflight.several_hosts(self.everyone):
            wire.send({"closed": preflight.closed_door(self.everyone, self._world.rank)})
            self._raise_problem(self._answer(wire))

    def _answer(self, wire: Wire) -> dict[str, Any]:
        while True:
            try:
                answer = wire.receive(0.5)
                break
            except TimeoutError:
                self._say_once(f"rank {self._world.rank} has met rank 0 at {self._where} and waits for the others")
                if time.monotonic() > self._until + 2.0:  # rank 0 gives up first, and knows more
                    raise RanksMissing(f"rank 0 at {self._where} gave no answer within {self._timeout:g} s") from None
            except ValueError:
                raise WorldError(
                    f"what answers at {self._where} is not rank 0 of a unidist job: the port is taken on the master, "
                    "or the address is wrong. Choose another ctrl_port, the same on every node."
                ) from None
        if answer is None:
            raise CommunicationError(f"rank 0 at {self._where} ended while the ranks were meeting: see its output")
        return answer

    def _raise_problem(self, answer: dict[str, Any]) -> None:
        if "problem" in answer:
            raise {kind.__name__: kind for kind in PROBLEMS}[answer["kind"]](answer["problem"])

    def _connect(self) -> Wire:
        """The way to rank 0, which has been told who comes."""
        while True:
            try:
                wire = Wire(socket.create_connection((self._world.master_addr, self._world.master_port), 2.0))
                wire.send({"rank": self._world.rank, "facts": self._facts})
                if not wire.closes_within(0.2):  # as Docker's proxy does where nothing listens behind it
                    return wire
                wire.close()
                error = ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
            except OSError as failure:
                error = failure
            why = error.strerror or str(error)
            waiting = f"rank {self._world.rank} cannot reach the master at {self._where} ({why})"
            hint = preflight.unreachable(error)
            self._say_once(f"{waiting} yet: {hint}")
            if time.monotonic() > self._until:
                raise CommunicationError(f"{waiting} within {self._timeout:g} s: {hint}")
            time.sleep(0.05)

    def _say_once(self, text: str) -> None:
        if time.monotonic() > self._notice:
            self._notice = float("inf")
            sys.stderr.write(f"unidist: {text}\n")
            sys.stderr.flush()

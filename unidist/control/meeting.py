"""The ranks meet before their engine starts: all of them are there and were started alike, or each hears who is not.

    meeting = Meeting(world, same, timeout)     a thread begins, so that nothing can hold up the caller
    world = meeting.complete()                  raises, or returns the world as it was met: hosts, addresses, interface

Under `unidist run` they meet at the launcher's server. Otherwise rank 0 opens one at the master's address. The
connection stays: it is the lifeline of the job (see `lifeline`) and carries values for the backend (`world.peers`).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from unidist import network
from unidist.control import lineage, troubles
from unidist.control.agreement import ungathered
from unidist.control.client import Control, NotOurs
from unidist.control.company import Company, Roster, WentOn
from unidist.control.host import Host
from unidist.control.host_process import LINGER
from unidist.control.listening import listen
from unidist.control.peers import Peers, node_addresses, place_among
from unidist.control.places import Place, connect_from_env, note_of, place_of
from unidist.control.protocol import Header, bind
from unidist.errors import CommunicationError, WorldError
from unidist.world import World

NOTICE = 5.0  # seconds of waiting after which a person is told what for
ATTEMPT = 3.0  # seconds for one attempt to connect
SERVER_START = 15.0  # seconds that a busy machine may take to start rank 0's own server
OVERTIME = 3.0  # seconds that the answer of a server may take on top of the timeout
RIVALS = 1.0  # seconds between visits to those who may take themselves for rank 0, too
SILENT_NOTE = 2.0  # seconds that nobody may answer where a note says: it may be that of a Strategy just closed
PAST = 0.1  # seconds for the server of an earlier start to make room
BUSY_PORT = LINGER + 2.0  # seconds that another may take to give up the port

_met: dict[str, int] = {}  # how many times this process has met others, by job


class Meeting:
    """`same` is what all must have in common, each with a text that people can compare; `company` who else comes.

    `control` is a connection to a server that the caller knows of, in place of one that a rank hosts.
    """

    def __init__(
        self,
        world: World,
        same: Mapping[str, str],
        timeout: float,
        company: Company | None = None,
        control: Control | None = None,
    ) -> None:
        self._world, self._same, self._timeout = world, dict(same), timeout
        self._company = company or Company()
        self._roster = Roster(world, self._company)
        self._began = time.monotonic()
        self._until = self._began + timeout
        self._launcher = connect_from_env() if world.source == "unidist" else None
        self._note = None if self._launcher else note_of(world)
        self._place = None if self._launcher or self._note else place_of(world)
        self._given, self._control = control, control
        self._host: Host | None = None
        self._rivals_verdict: Header = {}  # of a meeting elsewhere that has a rank 0, too
        self._trouble: Exception | None = None  # the last reason why we are not there yet
        self._result: World | BaseException | None = None
        self._cancelled = self._refused = False
        self._thread = threading.Thread(target=self._run, name="unidist-meeting", daemon=True)
        self._thread.start()

    def complete(self) -> World:
        """Wait for the others, no longer than the timeout and a few seconds."""
        # A launcher of ours starts all of them, and shows what keeps the workers.
        quiet = self._launcher is not None and self._world.role != "worker"
        notice = 0.0 if quiet else time.monotonic() + NOTICE
        while self._thread.is_alive():
            left = self._until + OVERTIME + 1.0 - time.monotonic()
            if left <= 0:
                self.abandon()
                raise self._late()
            self._thread.join(min(left, max(0.05, notice - time.monotonic())) if notice else left)
            if notice and time.monotonic() > notice and self._thread.is_alive():
                notice = 0.0
                self._say(troubles.waiting(self._world, self._where, self._trouble, self._roster.name, self._host_name))
        if isinstance(self._result, World):
            return self._result
        self.abandon()
        assert self._result is not None
        raise self._result

    def abandon(self) -> None:
        """Something else went wrong: the others hear that this rank is gone."""
        self._cancelled = True
        if self._control is not None:
            self._control.close()
        if self._host is not None:
            self._host.close(refused=self._refused)

    # -- in the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._result = self._meet()
        except WentOn:
            self._result = self._world  # without peers
        except BaseException as error:
            self._result = error

    def _meet(self) -> World:
        hosts = not (self._launcher or self._given) and self._roster.seat == self._host_seat
        generation = _met.get(self._job, 0) + 1
        scope = f"strategy {generation}"
        with self._hosting() if hosts else contextlib.nullcontext(), self._spare_port() as spare:
            header: Header = {"error": "past"}
            body = b""
            while header.get("error") == "past":
                control = self._control = self._launcher or self._given or self._connect()
                self._trouble = None
                if hosts and self._place and self._world.rivals:
                    threading.Thread(target=self._visit_rivals, args=(scope,), daemon=True).start()
                try:
                    header, body = self._join(control, scope, spare)
                except CommunicationError:
                    if not self._rivals_verdict:
                        raise
                    header, body = self._rivals_verdict, b""
                if header.get("error") == "past":  # those of an earlier start are still being told why it was refused
                    control.close()
                    time.sleep(PAST)
        if "error" in header:
            self._refused = True
            raise troubles.refusal(header, self._where, self._world, self._roster, self._company.hint)
        _met[self._job] = generation
        told = [json.loads(answer) for answer in ungathered(header, body)]
        return self._met_world(told, header["rank"], scope)

    def _join(self, control: Control, scope: str, more: Mapping[str, str]) -> tuple[Header, bytes]:
        mine = {"host": socket.gethostname(), "node": network.identity(), **more, **self._company.tells}
        wait = max(0.5, self._until - time.monotonic())
        usual_timeout, control.timeout = control.timeout, OVERTIME
        seats, ours = self._roster.seats(self._world.role), lineage.own()
        answer = control.connect().ask(
            "gather",
            json.dumps(mine | {"seen": control.seen, "reached": control.reached}).encode(),
            key=f"{scope}: the meeting",
            rank=self._roster.seat,
            size=self._roster.size,
            same=self._same,
            wait=wait,
            patience=wait,
            timeout=self._timeout,
            member=True,
            age=network.process_age(),
            role=self._world.role,
            seats=[seats.start, seats.stop],
            shape=self._roster.shape,
            name=self._roster.name,
            lineage=[ours.space, ours.pids],
        )
        control.timeout = usual_timeout
        return answer

    @contextlib.contextmanager
    def _spare_port(self) -> Iterator[dict[str, str]]:
        """For an engine that needs a port of rank 0's where only a file was named; bound until all have met."""
        if self._note is None or self._world.rank != 0:
            yield {}
            return
        with socket.socket() as spare:
            spare.bind(("", 0))
            yield {"port": str(spare.getsockname()[1])}

    def _met_world(self, everyone: list[dict[str, Any]], seat: int, scope: str) -> World:
        world, control = self._world, self._control
        assert control is not None
        told = everyone[: world.world_size]
        node = everyone[seat]["node"]
        number = seat - self._roster.seats(world.role).start
        addresses = node_addresses(everyone)
        place: dict[str, Any] = {}
        if world.role == "worker" and not world.placed:
            # Else its launcher has numbered them, and may have bound devices by those numbers.
            place = place_among([answer["node"] for answer in told], number)
        if world.local_rank >= 0 and os.environ.get("LOCAL_RANK"):
            place.pop("local_rank", None)
        peers = Peers(
            control=control,
            rank=number,
            size=world.world_size,
            hosts=tuple(answer["host"] for answer in told),
            addresses=tuple(addresses[answer["node"]] for answer in told),
            address=addresses[node],
            interface=network.interface_of(addresses[node]),
            scope=scope,
            launched=self._launcher is not None,
            host=self._host,
            services=tuple(
                {"role": role, "rank": n, **everyone[at]}
                for role in self._company.services
                for n, at in enumerate(self._roster.seats(role))
            ),
        )
        master: dict[str, Any] = {}
        if self._note is not None:
            master = {"master_port": int(told[0]["port"])} if "port" in told[0] else {}
        if self._launcher is None:
            master["master_addr"] = addresses[everyone[self._host_seat]["node"]]
        return replace(world, rank=number, **place, **master, peers=peers)

    # -- rank 0 ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _hosting(self) -> Iterator[None]:
        """Open the server that all meet at, and say where, if that is not known."""
        place, job = self._place, self._job
        if place is not None:
            listeners, widen = listen(self._world, place, min(BUSY_PORT, self._timeout), self._host_name)
            secret = place.secret
        elif self._note is not None:
            address = self._note.own_address()
            listeners, widen = [bind(address if network.is_loopback(address) else "", 0)], False
            secret = os.urandom(16).hex() if self._note.secret is None else self._note.secret
        else:
            raise WorldError(troubles.nowhere(self._world))
        port = listeners[0].getsockname()[1]
        bound = listeners[0].getsockname()[0]
        self._everywhere = bound in ("0.0.0.0", "::")
        host = "127.0.0.1" if self._everywhere else bound
        self._host = Host(listeners, secret, job, _met.get(job, 0) + 1, widen)
        self._hosted_place = Place(host, (port,), job, secret)
        if self._note is not None:
            self._note.write(port, secret)
        elif not secret and not _met:  # once in a process
            self._say(troubles.unguarded(bound, port, widen))
        try:
            yield
        finally:
            if self._note is not None:
                self._note.remove()

    def _visit_rivals(self, scope: str) -> None:
        """Others that take themselves for rank 0 would wait elsewhere, as we do here, until the time is over."""
        assert self._place is not None
        assert self._control is not None
        port, key = self._hosted_place.ports[0], f"{scope}: hosts"
        hosts = " ".join(sorted({self._place.host, *self._world.rivals})).encode()  # tells other jobs from ours
        self._control.put(key, hosts)
        while self._thread.is_alive():
            for host in self._world.rivals:
                with contextlib.suppress(OSError, CommunicationError):
                    address = network.resolve(host)
                    if network.is_own(address) if self._everywhere else address == self._hosted_place.host:
                        continue  # that would be ourselves
                    rival = self._control_at(self._place, port, host)
                    with contextlib.closing(rival):
                        if rival.get(key) == hosts:
                            self._rivals_verdict, _ = self._join(rival, scope, {})
                            return self._control.close()
            time.sleep(RIVALS)

    # -- the others --------------------------------------------------------------------------------------------

    @property
    def _host_seat(self) -> int:
        return self._roster.seats(self._company.host)[0]

    @property
    def _host_name(self) -> str:
        return self._roster.names([self._host_seat])

    @property
    def _job(self) -> str:
        """What tells this job's meetings from others'."""
        if self._place is not None:
            return self._place.job
        return self._note.path if self._note is not None else "the launcher's"

    @property
    def _where(self) -> str:
        if self._note is not None:
            return self._note.path
        return str(self._place) if self._place else "the launcher's control plane"

    def _connect(self) -> Control:
        """Connect to the host's server: try again until there is one that is ours, or the time is over."""
        until = self._until if self._host is None else max(self._until, time.monotonic() + SERVER_START)
        pause = 0.02
        while not self._cancelled:
            for place, host, port in self._candidates():
                try:
                    return self._control_at(place, port, host)
                except (OSError, NotOurs) as error:
                    # Somebody else who was there says more than nobody.
                    if isinstance(error, NotOurs) or not isinstance(self._trouble, NotOurs):
                        self._trouble = error
            if self._host is None and (seen := self._company.look()):
                self._trouble = CommunicationError(seen)
            if time.monotonic() > until:
                break
            time.sleep(pause)
            pause = min(0.3, pause * 1.3)
        raise self._late()

    def _candidates(self) -> Iterator[tuple[Place, str, int]]:
        place = self._place if self._host is None else self._hosted_place
        if place is not None:
            for port in place.ports:
                yield place, place.host, port
            return
        if self._note is None:
            raise WorldError(troubles.nowhere(self._world))
        note = self._note.read()
        if note is None:
            self._trouble = FileNotFoundError(self._note.path)
            return
        place = self._note.place(note)
        if isinstance(self._trouble, ConnectionRefusedError) and time.monotonic() > self._began + SILENT_NOTE:
            raise self._note.stale(note, "does not answer")
        yield place, place.host, place.ports[0]

    def _control_at(self, place: Place, port: int, host: str) -> Control:
        generation = _met.get(place.job, 0) + 1
        url = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        control = Control(url, place.secret, job=place.job, generation=generation, host=socket.gethostname())
        left = self._until - time.monotonic()
        return control.connect(ATTEMPT if self._host else max(0.2, min(ATTEMPT, left)))

    def _late(self) -> CommunicationError | WorldError:
        name, host = self._roster.name, self._host_name
        return troubles.unreachable(self._world, self._where, self._timeout, self._trouble, self._note, name, host)

    def _say(self, text: str) -> None:
        sys.stderr.write(f"unidist: {text}\n")
        sys.stderr.flush()

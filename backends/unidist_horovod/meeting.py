"""Horovod's start and end, the same for both frameworks: what its native library is told, and what its errors mean."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from unidist.plugin import (
    CommunicationError,
    PeerFailed,
    Peers,
    RanksDisagree,
    StateError,
    UsageError,
    World,
    WorldError,
    network,
)
from unidist_horovod import HorovodOptions
from unidist_horovod.store import Store

LEAST_TIMEOUT = 30  # seconds: Horovod's own
SHUT_DOWN = "Horovod has been shut down"  # by another rank, which is about to end
MOST_BYTES = 2**30  # in one operation: gloo counts them, those of all ranks when they are gathered, in 32 bits
GLOO = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}  # a build that has MPI too would take that
ALONE = {"RANK": 0, "SIZE": 1, "LOCAL_RANK": 0, "LOCAL_SIZE": 1, "CROSS_RANK": 0, "CROSS_SIZE": 1}


class Meeting:
    """A running Horovod. `hvd` is horovod.torch or horovod.mxnet, `internal_error` what a lost rank raises in it."""

    def __init__(
        self,
        hvd: Any,
        barrier: Callable[[], None],
        internal_error: type[Exception],
        world: World,
        options: HorovodOptions,
        timeout: float,
    ) -> None:
        self._hvd, self._barrier, self._internal_error = hvd, barrier, internal_error
        self.world = world
        if hvd.is_initialized():
            raise StateError(
                "Horovod is initialised already: leave hvd.init() to unidist, and close the first Strategy before "
                "opening another"
            )
        if options.timeline and world.rank == 0 and not Path(options.timeline).absolute().parent.is_dir():
            raise UsageError(
                f"timeline is {options.timeline!r}, whose folder does not exist on rank 0's host, "
                f"{socket.gethostname()}: make it first, or choose another"
            )
        variables = options.variables()
        if "HOROVOD_GLOO_TIMEOUT_SECONDS" not in os.environ:
            variables["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(max(LEAST_TIMEOUT, round(timeout)))
        if world.peers is not None and not _asked_for_messages(options):
            variables["HOROVOD_LOG_LEVEL"] = "fatal"
        if world.source == "openmpi" and hvd.mpi_built():
            with _environment(variables):  # the MPI library knows who is there
                self._init(timeout)
        elif not hvd.gloo_built():
            raise UsageError(f"this Horovod was built without gloo: start it with mpirun, not from {world.source}")
        elif world.peers is None:
            _require_name("127.0.0.1")
            variables |= GLOO | _as_variables(ALONE) | {"HOROVOD_GLOO_IFACE": "lo"}
            with _environment(variables, without=("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")):
                self._init(timeout)
        else:
            _require_name(world.peers.address)
            variables |= GLOO | _place(world.peers) | {"HOROVOD_GLOO_IFACE": _interface(world.peers)}
            with Store(world.peers) as store, _environment(variables | store.variables):
                self._init(timeout)
                with translated("the start", world.rank, internal_error):
                    barrier()  # nobody needs the store any more
        if (hvd.rank(), hvd.size()) != (world.rank, world.world_size):
            raise CommunicationError(
                f"Horovod counts itself rank {hvd.rank()} of {hvd.size()}, {world.source} says rank {world.rank} of "
                f"{world.world_size}: start all processes with one launcher"
            )
        mpi = hvd.mpi_built() and hvd.mpi_enabled()
        self.transport = f"{'mpi' if mpi else 'gloo'} (Horovod {_version()})"

    def _init(self, timeout: float) -> None:
        try:
            self._hvd.init()
        except Exception as error:
            peers = self.world.peers
            raise CommunicationError(
                f"rank {self.world.rank} of {self.world.world_size} has met the others, but Horovod could not connect "
                f"to them from {peers.address if peers else 'here'} within {timeout:g} s: do firewalls let all ports "
                "through between the hosts? HOROVOD_LOG_LEVEL=warning shows what Horovod says."
            ) from error

    def leave(self, failed: bool) -> None:
        if failed:
            return self._break_off()
        try:
            with translated("the end", self.world.rank, self._internal_error):
                self._barrier()
        except PeerFailed:
            self._break_off()
            raise
        self._hvd.shutdown()

    def _break_off(self) -> None:
        leaving = threading.Thread(target=self._hvd.shutdown, daemon=True)  # it may wait for peers
        leaving.start()
        leaving.join(timeout=2.0)


@contextlib.contextmanager
def translated(what: str, rank: int, internal_error: type[Exception]) -> Iterator[None]:
    """Horovod reports ranks that disagree, and dead ones, by the same exception."""
    try:
        yield
    except internal_error as error:
        text = str(error).strip().partition("\n")[0].removeprefix("MXNetError: ")
        if text.startswith("Mismatched") or "Invalid" in text:
            raise RanksDisagree(f"{what}: {text}") from error
        raise PeerFailed(
            f"rank {rank} lost another rank during {what}: {text.partition('. ')[0]}; see its error, or Horovod's lines"
        ) from error


# -- what Horovod is told ------------------------------------------------------------------------------------------


def _place(peers: Peers) -> dict[str, str]:
    """Local ranks by the hosts as they met, and across hosts those that have the same local rank: not simply the nodes,
    which need not hold equally many processes. Those of one node share an address; names of nodes need not differ."""
    nodes = list(dict.fromkeys(peers.addresses))
    here = [rank for rank, address in enumerate(peers.addresses) if address == peers.address]
    local = here.index(peers.rank)
    across = [address for address in nodes if peers.addresses.count(address) > local]
    numbers = {
        "RANK": peers.rank,
        "SIZE": peers.size,
        "LOCAL_RANK": local,
        "LOCAL_SIZE": len(here),
        "CROSS_RANK": across.index(peers.address),
        "CROSS_SIZE": len(across),
    }
    return _as_variables(numbers) | {"HOROVOD_HOSTNAME": f"node-{nodes.index(peers.address)}"}


def _as_variables(numbers: Mapping[str, int]) -> dict[str, str]:
    return {f"HOROVOD_{name}": str(number) for name, number in numbers.items()}


def _interface(peers: Peers) -> str:
    """Left alone, gloo takes whatever the hostname stands for, and crashes where it stands for nothing."""
    said, interfaces = os.environ.get("HOROVOD_GLOO_IFACE"), network.addresses()
    if said and said not in interfaces:
        raise UsageError(
            f"HOROVOD_GLOO_IFACE is {said!r}, but {socket.gethostname()} has no such interface with an IPv4 address, "
            f"only {', '.join(interfaces)}: correct it, or unset it"
        )
    if not said and peers.interface is None:
        raise UsageError(
            f"rank {peers.rank} on {socket.gethostname()} is known to the others as {peers.address}, which none of its "
            f"interfaces holds ({', '.join(interfaces)}): name the one that leads to the others in HOROVOD_GLOO_IFACE"
        )
    return said or str(peers.interface)


def _require_name(address: str) -> None:
    """Horovod connects its groups of processes by the host's own name, whatever interface it was told to use, and gloo
    crashes when that name stands for no address."""
    name = socket.gethostname()
    try:
        known = network.resolve(name)
    except OSError as error:
        raise WorldError(
            f"{name!r}, the name of this host, stands for no address ({error.strerror}), and Horovod needs one: add "
            f"the line `{address} {name}` to /etc/hosts"
        ) from None
    if network.is_loopback(known) and not network.is_loopback(address):
        raise WorldError(
            f"{name!r}, the name of this host, stands for {known} here, where ranks on other hosts would not find it, "
            f"and Horovod connects by that name: give it {address} in /etc/hosts"
        )


def _asked_for_messages(options: HorovodOptions) -> bool:
    """Horovod writes of a lost connection before anybody can know whose it is, and that line would come first. Its
    warnings of stalls can only be had together with that."""
    names = ("HOROVOD_LOG_LEVEL", "HOROVOD_STALL_CHECK_TIME_SECONDS", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS")
    return bool(options.stall_warning or options.stall_shutdown or any(map(os.environ.get, names)))


@contextlib.contextmanager
def _environment(variables: Mapping[str, str], without: tuple[str, ...] = ()) -> Iterator[None]:
    """Horovod reads them once, at its start. Left behind, they would tell a later Strategy another story."""
    before = {name: os.environ.get(name) for name in (*variables, *without)}
    os.environ.update(variables)
    for name in without:
        os.environ.pop(name, None)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _version() -> str:
    import horovod

    return str(horovod.__version__)

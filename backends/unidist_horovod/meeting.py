"""Horovod's start and end, the same for both frameworks: who is where, and what its native library is told."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from unidist.errors import CommunicationError, PeerFailed, RanksDisagree, StateError, UsageError
from unidist.world import World
from unidist_horovod import HorovodOptions
from unidist_horovod.rendezvous import Rendezvous, is_served, tell_everyone, wait_until_served

LEAST_TIMEOUT = 30  # seconds: Horovod's own
COURTESY = 1.0  # seconds: whoever failed shall end first, because horovodrun and mpirun name the first as the cause
SHUT_DOWN = "Horovod has been shut down"  # by another rank, which is about to end
MOST_BYTES = 2**30  # in one operation: gloo counts them, those of all ranks when they are gathered, in 32 bits
GLOO = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}  # a build that has MPI too would take that


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
        if world.source == "openmpi" and hvd.mpi_built():
            self.world = world  # the MPI library knows who is there
            with _environment(variables):
                self._init(timeout)
        elif not hvd.gloo_built():
            raise UsageError(f"this Horovod was built without gloo: start it with mpirun, not from {world.source}")
        elif world.world_size == 1:
            self.world = world
            variables |= GLOO | _place(World(0, 1)) | {"HOROVOD_GLOO_IFACE": "lo"}
            with _environment(variables, without=("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")):
                self._init(timeout)
        else:
            self._meet(world, variables, timeout)
        if (hvd.rank(), hvd.size()) != (self.world.rank, self.world.world_size):
            raise CommunicationError(
                f"Horovod counts itself rank {hvd.rank()} of {hvd.size()}, {world.source} says rank {world.rank} of "
                f"{world.world_size}: start all processes with one launcher"
            )
        mpi = hvd.mpi_built() and hvd.mpi_enabled()
        self.transport = f"{'mpi' if mpi else 'gloo'} (Horovod {_version()})"

    def _meet(self, world: World, variables: dict[str, str], timeout: float) -> None:
        host, port = _address(world)
        hosting = contextlib.nullcontext()
        if world.rank == 0 and not is_served(host, port):
            hosting = _host(world, host, port)
        with hosting:
            if world.source == "horovod":  # horovodrun's server, or variables set by hand: they say who is where
                wait_until_served(host, port, timeout)
            else:
                names = tell_everyone(host, port, world.rank, world.world_size, socket.gethostname(), timeout)
                world = _with_neighbours(world, names)
                variables |= _cross(world, names)
            variables |= GLOO | _place(world) | {"HOROVOD_GLOO_RENDEZVOUS_ADDR": host}
            variables |= {"HOROVOD_GLOO_RENDEZVOUS_PORT": str(port), "HOROVOD_HOSTNAME": _hostname()}
            if "HOROVOD_GLOO_IFACE" not in os.environ:
                variables["HOROVOD_GLOO_IFACE"] = _interface_to(host)
            with _environment(variables):
                self._init(timeout)
            with translated("the start", world.rank, self._internal_error):
                self._barrier()  # nobody needs the server any more
        self.world = replace(world, master_addr=host)

    def _init(self, timeout: float) -> None:
        try:
            self._hvd.init()
        except Exception as error:
            raise CommunicationError(
                f"Horovod could not start within {timeout:g} s; its own lines above say why ({error})"
            ) from error

    def leave(self, failed: bool) -> None:
        if failed:
            self._break_off(sys.exc_info()[1])
            return
        try:
            with translated("the end", self.world.rank, self._internal_error):
                self._barrier()
        except PeerFailed as error:
            self._break_off(error)
            raise
        self._hvd.shutdown()

    def _break_off(self, error: BaseException | None) -> None:
        leaving = threading.Thread(target=self._hvd.shutdown, daemon=True)  # it may wait for peers
        leaving.start()
        leaving.join(timeout=2.0)
        if SHUT_DOWN in str(error):
            time.sleep(COURTESY)


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


def _address(world: World) -> tuple[str, int]:
    host, port = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR"), os.environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT", "")
    if world.source == "horovod" and host:
        if not port.isdecimal() or not 0 < int(port) < 65536:
            raise UsageError(f"HOROVOD_GLOO_RENDEZVOUS_PORT is {port!r}, which is not a port")
        return _resolved("HOROVOD_GLOO_RENDEZVOUS_ADDR", host), int(port)
    if world.master_addr is None or world.master_port is None:
        wanted = (
            "HOROVOD_GLOO_RENDEZVOUS_ADDR and HOROVOD_GLOO_RENDEZVOUS_PORT"
            if world.source == "horovod"
            else "MASTER_ADDR and MASTER_PORT"
        )
        raise UsageError(
            f"{world.source} does not say where the ranks meet: set {wanted}, the same for every process, to rank 0's "
            "host and a free port there, or start with `unidist run` or horovodrun"
        )
    return _resolved("the master's address", world.master_addr), world.master_port


def _resolved(name: str, host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise UsageError(
            f"{name} is {host!r}, which this host, {socket.gethostname()}, cannot resolve ({error.strerror}): say rank "
            "0's IP address, or a name that every host knows"
        ) from error


def _host(world: World, host: str, port: int) -> Rendezvous:
    # A host's own name often stands for loopback in its /etc/hosts, where the others would not find it.
    everywhere = host.startswith("127.") and world.num_nodes != 1
    try:
        return Rendezvous("" if everywhere else host, port)
    except OSError as error:
        raise CommunicationError(
            f"rank 0 cannot open the meeting place at {host}:{port} ({error.strerror}): the address must be one of "
            f"this host's, {socket.gethostname()}, and the port free"
        ) from error


def _with_neighbours(world: World, names: list[str]) -> World:
    here = [rank for rank, name in enumerate(names) if name == names[world.rank]]
    nodes = list(dict.fromkeys(names))
    return replace(
        world,
        local_rank=here.index(world.rank),
        local_world_size=len(here),
        node_rank=nodes.index(names[world.rank]),
        num_nodes=len(nodes),
    )


def _cross(world: World, names: list[str]) -> dict[str, str]:
    """Who else has my local rank: not simply the nodes, which need not hold equally many processes."""
    nodes = [name for name in dict.fromkeys(names) if names.count(name) > world.local_rank]
    own = nodes.index(names[world.rank])
    return {"HOROVOD_CROSS_RANK": str(own), "HOROVOD_CROSS_SIZE": str(len(nodes))}


def _place(world: World) -> dict[str, str]:
    numbers = {
        "RANK": world.rank,
        "SIZE": world.world_size,
        "LOCAL_RANK": world.local_rank,
        "LOCAL_SIZE": world.local_world_size,
    }
    return {f"HOROVOD_{name}": str(number) for name, number in numbers.items()}


def _hostname() -> str:
    return os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()


def _interface_to(host: str) -> str:
    """The name of the network interface that leads there. Left alone, gloo takes whatever the hostname stands for."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing: it only asks the kernel
        own = probe.getsockname()[0]
        if own.startswith("127."):
            return "lo"
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
                if socket.inet_ntoa(answer[20:24]) == own:
                    return name
    return ""


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

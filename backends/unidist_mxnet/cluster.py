"""What ps-lite leaves out: who belongs to a job, checks before it starts, and addresses that really connect.

ps-lite waits without end for a process that does not come, and ends in a native stack when its port is taken. So all of
a job meet first (see `unidist.control`): at the launcher's control plane, or behind the scheduler's port.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

from unidist.plugin import Company, StateError, UsageError, WentOn, WorldError, network
from unidist_mxnet import memory

if TYPE_CHECKING:
    from unidist.plugin import World
    from unidist_mxnet import MxnetOptions

LOOK = 1.0  # seconds for a look at the scheduler's port
ZEROMQ = b"\xff"  # how ps-lite greets whoever connects
HINT = (
    "A scheduler or server that imports mxnet before it makes a Strategy is caught inside that import: import it after "
    "unidist.Strategy(), or start these roles with `python -m unidist_mxnet.services`."
)

store_was_closed = False  # ps-lite cannot be started twice in one process
_reserved: list[socket.socket] = []  # the scheduler's port, until ps-lite takes it


def store_name(options: MxnetOptions, env: Mapping[str, str] = os.environ) -> str:
    if options.kvstore == "auto":
        return "dist_sync" if "DMLC_ROLE" in env else "local"
    return options.kvstore


def company(world: World, options: MxnetOptions) -> Company | None:
    """The servers and the scheduler, which meet with the workers; None where nothing is distributed."""
    name = store_name(options)
    distributed = name.startswith("dist")
    if distributed and store_was_closed:
        raise StateError(
            "a distributed KVStore was closed in this process, and MXNet cannot make a second one: keep one "
            "Strategy for the whole script, or start a new process"
        )
    if not distributed:
        if world.world_size > 1:
            raise UsageError(f"kvstore {name!r} is for one worker, and here are {world.world_size}: use dist_sync")
        return None
    if "DMLC_ROLE" not in os.environ or world.source not in ("unidist", "dmlc"):
        raise UsageError(
            f"kvstore {name!r} needs a scheduler and servers: start with `unidist run --backend mxnet "
            "--nproc N --servers M …`, or with MXNet's own variables (DMLC_ROLE, DMLC_PS_ROOT_URI, …)"
            + ("" if world.source == "none" else f"; what {world.source} says ({world.reason}) is not enough")
        )
    asked, told = options.bigarray_bound, os.environ.get("MXNET_KVSTORE_BIGARRAY_BOUND")
    if told is not None and asked not in (type(options).bigarray_bound, int(told)):
        raise UsageError(
            f"bigarray_bound is {asked} here, and the job was started with {told}: say it to `unidist run --option "
            f"bigarray_bound={asked}`, or in MXNET_KVSTORE_BIGARRAY_BOUND"
        )
    services = {"server": int(os.environ["DMLC_NUM_SERVER"]), "scheduler": 1}
    tells = memory.of_server(options.server_memory) if world.role == "server" else {}
    if world.source == "unidist":
        return Company(services, tells=tells)
    if world.role == "scheduler":
        _reserve_port(world)
    return Company(services, "scheduler", tells, lambda: _look_at_scheduler(world), HINT)


def _reserve_port(world: World) -> None:
    """ps-lite would end in a native stack if another program had it."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as ps-lite does, so both can have it
    try:
        reserved.bind(("", world.master_port or 0))
    except OSError as error:
        from unidist.plugin import holder

        who = f": {holder(world.master_port)}" if error.errno == errno.EADDRINUSE and world.master_port else ""
        raise WorldError(
            f"the scheduler cannot have port {world.master_port} on {socket.gethostname()} ({error.strerror}){who}. "
            "Choose another DMLC_PS_ROOT_PORT, the same for every process."
        ) from None
    _reserved.append(reserved)


def _look_at_scheduler(world: World) -> str:
    """A scheduler of ours starts ps-lite only when all have met."""
    if world.master_port is None:
        return ""
    where = f"{world.master_addr}:{world.master_port}"
    try:
        wire = socket.create_connection((world.master_addr, world.master_port), timeout=LOOK)
    except OSError:
        return ""  # nobody: the attempts to meet have told the same
    with wire:
        try:
            greeting = wire.recv(1)
        except TimeoutError:
            return f"a program at {where} accepts connections and says nothing: {_ANOTHER}"
        except OSError:
            greeting = b""
    if greeting == ZEROMQ:
        raise WentOn
    return f"another program than MXNet's scheduler has {where}: {_ANOTHER}"


_ANOTHER = "choose another DMLC_PS_ROOT_PORT, the same for every process, or end that program"


def tell_addresses(world: World) -> None:
    """Complete DMLC_* before the library reads it, with addresses that were seen to connect."""
    env, peers = os.environ, world.peers
    if world.source != "dmlc":
        return  # our launcher has set them
    if peers is not None and world.master_addr:
        env["DMLC_PS_ROOT_URI"] = world.master_addr
    if "DMLC_NODE_HOST" not in env and "DMLC_INTERFACE" not in env:
        # ps-lite would take the first interface it finds, which the others need not reach, and dies when there is none.
        env["DMLC_NODE_HOST"] = peers.address if peers else network.address_towards(env["DMLC_PS_ROOT_URI"])

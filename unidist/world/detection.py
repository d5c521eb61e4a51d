"""From arguments and environment variables to a `World`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from urllib.parse import urlsplit

from unidist.errors import WorldError
from unidist.world.environments import from_environment
from unidist.world.variables import Variables, check_rank, master_at
from unidist.world.world import World


def detect(
    env: Mapping[str, str] | None = None,
    *,
    init: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> World:
    """Find this process's World; the arguments win over `env` (default: os.environ).

    `init` is "tcp://host:port" or "file:///path", both with rank and world_size, or "env://", the default. A rank or
    world_size of -1, as torch's scripts pass it, is the same as None: from the environment.
    Nothing here waits for the other ranks: they meet later (see `unidist.control.meeting`).
    """
    variables = Variables(os.environ if env is None else env)
    rank, world_size = (None if given == -1 else given for given in (rank, world_size))
    if init is not None and init != "env://":
        return _initialised(variables, init, rank, world_size)
    if rank is None and world_size is None:
        return from_environment(variables)
    return _overridden(variables, rank, world_size)


def _initialised(env: Variables, init: str, rank: int | None, size: int | None) -> World:
    reason = f"init={init!r} was given"
    found: World | None = None
    if rank is None or size is None:
        missing = " and ".join(n for n, v in (("rank", rank), ("world_size", size)) if v is None)
        found = _completing(env, rank, size)
        if found is None:
            raise WorldError(
                f"{reason}, but not {missing}, and no launcher's variables are set: give each process its rank= and "
                "the common world_size="
            )
        reason += f", {missing} from {found.source} ({found.reason})"
        rank, size = (found.rank if rank is None else rank), (found.world_size if size is None else size)
    check_rank("rank", rank, "world_size", size)
    scheme, _, rest = init.partition("://")
    if scheme == "tcp":
        addr, port = _tcp(init)
        place = env.place(rank, size, addr) if found is None else found.place
        return World(rank, size, **place, **master_at(addr, port), source="tcp", reason=reason)
    if scheme == "file":
        if not rest.startswith("/"):
            raise WorldError(f"{reason}: a file needs an absolute path, as in file:///shared/run1 (three slashes)")
        return World(rank, size, **env.place(rank, size, None), source="file", reason=reason, note=rest)
    raise WorldError(f"{reason}; expected tcp://host:port, file:///path or env://")


def _tcp(init: str) -> tuple[str, int]:
    url = urlsplit(init)
    try:
        port = url.port
    except ValueError:
        port = None
    if not url.hostname or not port:
        raise WorldError(f"init={init!r} was given; expected tcp://host:port with a port from 1 to 65535")
    return url.hostname, port


def _overridden(env: Variables, rank: int | None, size: int | None) -> World:
    """rank= and world_size= without a place to meet: that comes from the environment, as may one of the two."""
    given = ", ".join(f"{n}={v}" for n, v in (("rank", rank), ("world_size", size)) if v is not None)
    found: World | None = World(0, 1)
    if rank is None or size is None or (size > 1 and "MASTER_ADDR" not in env):
        found = _completing(env, rank, size)
        if found is None and (rank is None or size is None):
            missing = "world_size" if size is None else "rank"
            raise WorldError(f"{given} was given, but not {missing}, nor init=, and no launcher's variables are set")
    found = found or World(0, 1)
    rank = found.rank if rank is None else rank
    size = found.world_size if size is None else size
    check_rank("rank", rank, "world_size", size)
    addr, port = found.master_addr, found.master_port
    if "MASTER_ADDR" in env:
        addr, port = env.text("MASTER_ADDR"), env.port("MASTER_PORT")
    if size > 1 and addr is None:
        raise WorldError(
            f"{given} was given, but nowhere to meet: add init='tcp://host:port', the same on every rank, "
            "or set MASTER_ADDR and MASTER_PORT"
        )
    place = env.place(rank, size, addr)
    return World(rank, size, **place, **master_at(addr, port), source="arguments", reason=f"{given} was given")


def _completing(env: Variables, rank: int | None, size: int | None) -> World | None:
    """What the environment says, for the one of the two that was not given. RANK alone, or WORLD_SIZE, is enough."""
    if (rank is None) != (size is None):
        name, other, value = ("RANK", "WORLD_SIZE", size) if rank is None else ("WORLD_SIZE", "RANK", rank)
        if name in env and other not in env:
            env = env.also(other, str(value))
    found = from_environment(env)
    return None if found.source == "none" else found

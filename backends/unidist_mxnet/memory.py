"""Do the servers have room for the model? Each tells at the meeting how much memory it may use; the workers compare."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

GB = 2**30
CGROUPS = {"": ("/sys/fs/cgroup", "memory.max"), "memory": ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")}


def of_this_process() -> int:
    """Bytes: what the machine has, and no more than any control group allows that this process is in."""
    least = int(Path("/proc/meminfo").read_text().split("MemTotal:")[1].split()[0]) * 1024
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for root, name in (CGROUPS[controller] for controller in controllers.split(",") if controller in CGROUPS):
            inner = Path(path.lstrip("/"))
            for group in (inner, *inner.parents):
                limit = Path(root) / group / name
                if limit.is_file() and limit.read_text().strip().isdecimal():
                    least = min(least, int(limit.read_text()))
    return least


def of_server(granted: float) -> dict[str, Any]:
    """What a server tells. `granted` is the option server_memory, in GB."""
    has = of_this_process()
    return {"bytes": int(granted * GB) or has, "granted": granted > 0, "has": has}


OTHERWISE = "or say server_memory_check='warn' to go on all the same"


def granted_too_much(servers: int, granted: float, has: int, where: str) -> str | None:
    """`granted` is what the option server_memory gives each of so many servers on one host that `has` less."""
    if servers * granted * GB <= has:
        return None
    return (
        f"server_memory grants {granted:g} GB to each of {servers} server{'s' * (servers > 1)}, and {where} has "
        f"{_size(has)} in all: grant less, start fewer servers there, {OTHERWISE}"
    )


def too_little(model: int, copies: int, servers: Iterable[Mapping[str, Any]]) -> str | None:
    """`copies`: a server holds the model, the sum of gradients, and the optimizer's state if it updates."""
    hosts: dict[str, int] = {}
    for server in servers:  # those of one host share its memory, unless each was granted its own
        shared = 0 if server.get("granted") else hosts.get(str(server["host"]), 0)
        hosts[str(server["host"])] = hosts.get(str(server["host"]), 0) - shared + int(server["bytes"])
    have, need = sum(hosts.values()), model * copies
    if not hosts or need <= have:
        return None
    return (
        f"the servers have {_size(have)} of memory on {len(hosts)} host{'s' * (len(hosts) > 1)}, and need "
        f"{_size(need)} for {copies} copies of the model's {_size(model)} (values, gradients, optimizer state): start "
        f"more servers on other hosts, give them more, {OTHERWISE}"
    )


def _size(count: float) -> str:
    unit, name = next(((unit, name) for unit, name in ((GB, "GB"), (2**20, "MB")) if count >= unit), (2**10, "KB"))
    return f"{count / unit:.1f} {name}"

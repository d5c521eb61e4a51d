"""Do the servers have room for the model? Each tells how much memory it may use; rank 0 compares and warns.

Who has not told is no server of unidist's: a script that imports mxnet before it makes a Strategy is caught by MXNet's
own server, inside that import.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

from unidist.control import Control

GB = 2**30
CGROUPS = {"": ("/sys/fs/cgroup", "memory.max"), "memory": ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")}


def of_this_process() -> int:
    """Bytes: what the machine has, and no more than any control group allows that this process is in."""
    least = int(Path("/proc/meminfo").read_text().split("MemTotal:")[1].split()[0]) * 1024
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for root, name in (CGROUPS[each] for each in controllers.split(",") if each in CGROUPS):
            inner = Path(path.lstrip("/"))
            for group in (inner, *inner.parents):
                limit = Path(root) / group / name
                if limit.is_file() and limit.read_text().strip().isdecimal():
                    least = min(least, int(limit.read_text()))
    return least


def tell(control: Control, server: int, granted: float) -> None:
    """`granted` is the option server_memory, in GB."""
    said = {"host": socket.gethostname(), "bytes": int(granted * GB) or of_this_process(), "granted": granted > 0}
    control.put(f"mxnet/memory/{server}", json.dumps(said).encode())


def ask(control: Control, servers: int) -> list[dict[str, int | str]]:
    """Of the servers that have told."""
    answers = (control.get(f"mxnet/memory/{server}") for server in range(servers))
    return [json.loads(answer) for answer in answers if answer]


def warning(model: int, copies: int, servers: Iterable[Mapping[str, int | str]]) -> str | None:
    """`copies`: a server holds the model, the sum of gradients, and the optimizer's state if it updates."""
    hosts: dict[str, int] = {}
    for each in servers:  # those of one host share its memory, unless each was granted its own
        shared = 0 if each.get("granted") else hosts.get(str(each["host"]), 0)
        hosts[str(each["host"])] = hosts.get(str(each["host"]), 0) - shared + int(each["bytes"])
    have, need = sum(hosts.values()), model * copies
    if not hosts or need <= have:
        return None
    return (
        f"the servers have {_size(have)} of memory on {len(hosts)} host{'s' * (len(hosts) > 1)}, and need "
        f"{_size(need)} for {copies} copies of the model's {_size(model)} (values, gradients, optimizer state): start "
        "more servers on other hosts, or give them more"
    )


def _size(count: float) -> str:
    unit, name = next(((unit, name) for unit, name in ((GB, "GB"), (2**20, "MB")) if count >= unit), (2**10, "KB"))
    return f"{count / unit:.1f} {name}"

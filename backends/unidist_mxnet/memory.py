"""Do the servers have room for the model? Each tells how much memory it may use; rank 0 compares and warns."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

from unidist.control import Control

LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def of_this_process() -> int:
    """Bytes: what the container allows, at most what the machine has."""
    total = int(Path("/proc/meminfo").read_text().split("MemTotal:")[1].split()[0]) * 1024
    for path in map(Path, LIMITS):
        if path.is_file() and path.read_text().strip().isdecimal():
            return min(total, int(path.read_text()))
    return total


def tell(control: Control, server: int) -> None:
    said = {"host": socket.gethostname(), "bytes": of_this_process()}
    control.put(f"mxnet/memory/{server}", json.dumps(said).encode())


def ask(control: Control, servers: int) -> list[dict[str, int | str]]:
    """Of the servers that have told."""
    answers = (control.get(f"mxnet/memory/{server}") for server in range(servers))
    return [json.loads(answer) for answer in answers if answer]


def warning(model: int, copies: int, servers: Iterable[Mapping[str, int | str]]) -> str | None:
    """`copies`: a server holds the model, the sum of gradients, and the optimizer's state if it updates."""
    hosts = {str(each["host"]): int(each["bytes"]) for each in servers}  # servers of one host share its memory
    have, need = sum(hosts.values()), model * copies
    if not hosts or need <= have:
        return None
    return (
        f"the servers have {_size(have)} of memory on {len(hosts)} host{'s' * (len(hosts) > 1)}, and need "
        f"{_size(need)} for {copies} copies of the model's {_size(model)} (values, gradients, optimizer state): start "
        "more servers on other hosts, or give them more"
    )


def _size(count: float) -> str:
    return f"{count / 2**30:.1f} GB" if count >= 2**30 else f"{count / 2**20:.1f} MB"

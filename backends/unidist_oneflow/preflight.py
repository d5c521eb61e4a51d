"""What has to be the same on all nodes, and what each can see for itself: the checks of OneFlow's distributed FAQ."""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from unidist._version import __version__
from unidist.errors import WorldError
from unidist.world import World

Facts = dict[str, Any]

# fact -> (what it is called, what to do when it differs), in the order in which a difference is worth reporting
COMPARED = {
    "machine": ("the list of machines", "give every node the same list"),
    "world_size": ("the number of processes", "start the same number on every node"),
    "oneflow": ("the version of oneflow", "install the same one on every node"),
    "unidist": ("the version of unidist", "install the same one on every node"),
    "script": ("the script", "copy it to every node again"),
    "view": ("the view", "give every process the same options"),
}


def gather_facts(world: World, machine: Sequence[str] | None, view: str) -> Facts:
    return {
        "host": socket.gethostname(),
        "machine": ", ".join(machine or ()),
        "world_size": world.world_size,
        "oneflow": metadata.version("oneflow"),
        "unidist": __version__,
        "script": script_hash(),
        "view": view,
    }


def difference(ours: Facts, theirs: Facts, rank: int) -> str | None:
    """What does not fit between rank 0 and `rank`, or None."""
    for fact, (name, advice) in COMPARED.items():
        if ours[fact] != theirs[fact]:
            return (
                f"{name} differs between nodes: {ours[fact] or 'none'} for rank 0 on {ours['host']}, "
                f"{theirs[fact] or 'none'} for rank {rank} on {theirs['host']}. OneFlow would wait for ever: {advice}."
            )
    return None


def script_hash() -> str:
    """The main script's name and the beginning of its SHA-256."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is None or not os.path.isfile(script):
        return "typed in"
    return f"{os.path.basename(script)} (sha256 {hashlib.sha256(Path(script).read_bytes()).hexdigest()[:12]})"


def unreachable(error: OSError) -> str:
    """What to look at, by the way in which the connection failed."""
    if isinstance(error, socket.gaierror):
        return "its name cannot be resolved; give the address instead"
    if error.errno == errno.ECONNREFUSED:
        return (
            "nothing listens there. Was the script started on the master, is its address the first in the list, and, "
            "if it runs in a container, is the port mapped out (docker run --net=host, or -p)?"
        )
    return "no way leads there from this host: look at the address, the network and the firewall"


def check_interface(world: World, own_address: str | None, on_gpu: bool) -> None:
    """NCCL picks an interface itself, and may pick a virtual one: give it the one with the machine's address."""
    known = {name for _, name in socket.if_nameindex()}
    asked = os.environ.get("NCCL_SOCKET_IFNAME", "")
    wanted = [name for name in asked.lstrip("^=").split(",") if name]
    if asked and not asked.startswith("^") and not any(each.startswith(tuple(wanted)) for each in known):
        raise WorldError(
            f"NCCL_SOCKET_IFNAME is {asked!r}, and this host ({socket.gethostname()}) has only "
            f"{', '.join(sorted(known))}: name one of these, or unset it"
        )
    if on_gpu and world.num_nodes > 1 and not asked and own_address:
        carrier = interface_of(own_address)
        if carrier:
            os.environ["NCCL_SOCKET_IFNAME"] = carrier


def interface_of(address: str) -> str | None:
    """The interface that carries an address of this host."""
    import fcntl
    import struct

    number = socket.gethostbyname(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asked, 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
            except OSError:
                continue
            if socket.inet_ntoa(answer[20:24]) == number:
                return name
    return None

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
    "graph": ("graph=", "give every process the same options"),
}


def gather_facts(world: World, machine: Sequence[str] | None, view: str, graph: bool) -> Facts:
    return {
        "host": socket.gethostname(),
        "address": world.master_addr,  # as seen by rank 0, which puts the others' in
        "machine": ", ".join(machine or ()),
        "world_size": world.world_size,
        "oneflow": metadata.version("oneflow"),
        "unidist": __version__,
        "script": script_hash(),
        "view": view,
        "graph": str(graph),
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
            "if it runs in a container, has that the host's network (docker run --net=host)?"
        )
    return "no way leads there from this host: look at the address, the network and the firewall"


def open_door() -> socket.socket:
    """A port that the system chooses, as OneFlow will, for others to knock at."""
    door = socket.socket()
    door.bind(("", 0))
    door.listen(512)
    return door


def several_hosts(everyone: Sequence[Facts]) -> bool:
    return len({facts["host"] for facts in everyone}) > 1


def closed_door(everyone: Sequence[Facts], rank: int) -> str | None:
    """What is wrong when `rank` cannot reach a rank of another host, or None; one rank of each host is tried."""
    tried = {everyone[rank]["host"]}
    for other, facts in enumerate(everyone):
        if facts["host"] in tried:
            continue
        tried.add(facts["host"])
        try:
            socket.create_connection((facts["address"], facts["door"]), 3.0).close()
        except OSError as error:
            return (
                f"rank {rank} on {everyone[rank]['host']} cannot reach rank {other} on {facts['host']} at "
                f"{facts['address']}, port {facts['door']} ({error.strerror or error}). OneFlow talks on ports that it "
                "chooses itself, beside ctrl_port, so it would wait for ever: open them all between the nodes "
                "(firewall), and start containers with the host's network (docker run --net=host; mapping ports by -p "
                "is not enough)."
            )
    return None


def check_interface(world: World, own_address: str | None, on_gpu: bool) -> None:
    """NCCL picks an interface itself, and may pick a virtual one: give it the one with the machine's address."""
    known = sorted(name for _, name in socket.if_nameindex())
    carrier = interface_of(own_address) if on_gpu and world.num_nodes > 1 and own_address else None
    asked = os.environ.get("NCCL_SOCKET_IFNAME", "")
    if not asked:
        if carrier:
            os.environ["NCCL_SOCKET_IFNAME"] = carrier
        return
    named = tuple(name for name in asked.lstrip("^=").split(",") if name)
    left = [each for each in known if each.startswith(named) != asked.startswith("^")]
    if not left or (carrier and carrier not in left):
        wanted = f"{carrier}, which has this node's address {own_address}" if carrier else f"one of {', '.join(known)}"
        raise WorldError(
            f"NCCL_SOCKET_IFNAME is {asked!r}, which leaves NCCL {', '.join(left) or 'no interface'} on this host "
            f"({socket.gethostname()}): let it name {wanted}, or unset it"
        )


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

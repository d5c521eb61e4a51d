"""The ranks that have met, as a backend sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unidist import network
from unidist.control.client import Control

if TYPE_CHECKING:
    from unidist.control.host import Host


@dataclass(frozen=True)
class Peers:
    """What a backend may want of the meeting: who is where, and values exchanged outside of the engine."""

    control: Control
    rank: int
    size: int
    hosts: tuple[str, ...]  # the name of each rank's host
    addresses: tuple[str, ...]  # where each rank can be reached by the others
    address: str  # of this process
    interface: str | None  # that holds it
    scope: str  # in front of every key, so that a later Strategy finds none of ours
    launched: bool  # a launcher of ours watches all ranks, and ends them together
    host: Host | None  # the server, where it is this process's
    services: tuple[dict[str, Any], ...] = ()  # what each process beside the workers told: role, rank, host, ...

    def key(self, name: str) -> str:
        return f"{self.scope}/{name}"

    def gather(self, name: str, value: Any, timeout: float) -> list[Any]:
        """What each rank says, in JSON. A name is used once."""
        return self.control.gather(self.key(name), self.rank, self.size, value, timeout)

    def gather_bytes(self, name: str, value: bytes, timeout: float) -> list[bytes]:
        return self.control.gather_bytes(self.key(name), self.rank, self.size, value, timeout)


def place_among(nodes: list[str], rank: int) -> dict[str, Any]:
    """Where a worker is in the World, from the node that each of them is on."""
    here = [n for n, node in enumerate(nodes) if node == nodes[rank]]
    different = list(dict.fromkeys(nodes))
    return {
        "local_rank": here.index(rank),
        "local_world_size": len(here),
        "node_rank": different.index(nodes[rank]),
        "num_nodes": len(different),
    }


def node_addresses(told: list[dict[str, Any]]) -> dict[str, str]:
    """Where each node can be reached, from the connections that were really made."""
    nodes = list(dict.fromkeys(answer["node"] for answer in told))
    if len(nodes) == 1:
        return {nodes[0]: "127.0.0.1"}
    found: dict[str, str] = {}
    for answer in told:
        if not network.is_loopback(answer["seen"]):
            found.setdefault(answer["node"], answer["seen"])
    # The server's own node may only have been seen on loopback; the others know where they reached it.
    reached = next((answer["reached"] for answer in told if not network.is_loopback(answer["reached"])), "127.0.0.1")
    return {node: found.get(node, reached) for node in nodes}

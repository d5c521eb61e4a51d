"""`World`: one process's place among all of a job."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from unidist.control.peers import Peers


class Place(TypedDict):
    """Where a process is among the nodes."""

    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int


@dataclass(frozen=True)
class World:
    """One process's place among all. What the launcher does not tell is -1 (a rank) or 0 (a size)."""

    rank: int
    world_size: int
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    role: str = "worker"
    master_addr: str | None = None
    master_port: int | None = None
    source: str = "none"
    reason: str = "no launcher's variables are set"
    placed: bool = False  # local and node ranks are the launcher's word, not guessed from an address
    port_variable: str = "MASTER_PORT"  # where the user chooses another one
    port_taken: bool = False  # a server of the launcher's has the master's port; the ranks meet behind it
    note: str | None = None  # where rank 0 writes how to reach it: a file, or a key of the launcher's (http://)
    rivals: tuple[str, ...] = ()  # hosts that may take themselves for rank 0, too, where each numbers itself by a list
    peers: Peers | None = field(default=None, compare=False, repr=False)  # once the ranks have met

    @property
    def is_main(self) -> bool:
        return self.rank == 0 and self.role == "worker"

    @property
    def place(self) -> Place:
        return {
            "local_rank": self.local_rank,
            "local_world_size": self.local_world_size,
            "node_rank": self.node_rank,
            "num_nodes": self.num_nodes,
        }

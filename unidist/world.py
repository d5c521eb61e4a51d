"""Who am I, and who else is there: `World`, and how it is found in each cluster environment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class World:
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

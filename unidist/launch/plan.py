"""A job as pure data: which processes run where, with which environment and command. Nothing starts here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Job:
    """What the user asked for, with every choice made: the input of a plan."""

    backend: str
    command: tuple[str, ...]  # interpreter, script, arguments
    nproc: int
    servers: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    host: str = "127.0.0.1"
    ports: Sequence[int] = ()  # free ports, as many as the plan needs


@dataclass(frozen=True)
class Process:
    """One process of a plan."""

    role: str
    rank: int
    host: str
    env: Mapping[str, str]
    command: tuple[str, ...]

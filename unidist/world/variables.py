"""Environment variables of launchers, read with errors that say what is wrong with which."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypedDict

from unidist.errors import WorldError
from unidist.network import is_loopback
from unidist.world.world import Place


class Master(TypedDict):
    master_addr: str | None
    master_port: int | None


def master_at(addr: str | None, port: int | None) -> Master:
    return {"master_addr": addr, "master_port": port}


class Variables:
    """Environment variables, read with errors that name the variable and its value. Empty is the same as unset."""

    def __init__(self, values: Mapping[str, str], launcher: str = "") -> None:
        self._values = values
        self._launcher = launcher

    def of(self, launcher: str) -> Variables:
        """The same, with `launcher` named in errors as the one that should have set them."""
        return Variables(self._values, launcher)

    def also(self, name: str, value: str) -> Variables:
        return Variables({**self._values, name: value}, self._launcher)

    def __contains__(self, name: str) -> bool:
        return self.text(name) is not None

    def text(self, name: str) -> str | None:
        return self._values.get(name, "").strip() or None

    def number(self, name: str, default: int | None = None) -> int:
        text = self.text(name)
        if text is None and default is not None:
            return default
        if text is None:
            raise WorldError(f"{name} is not set: {self._launcher}")
        if not re.fullmatch(r"[0-9]+", text):
            raise WorldError(f"{name} is {text!r}, which is not a whole number from 0 up: {self._launcher}")
        return int(text)

    def port(self, name: str) -> int:
        port = self.number(name)
        if not 0 < port < 65536:
            raise WorldError(f"{name} is {port}, which is not a port: set it to a free one from 1 to 65535")
        return port

    def numbers(self, name: str, other: str) -> tuple[int, int]:
        return self.number(name), self.number(other)

    def rank(self, name: str, size_name: str) -> tuple[int, int]:
        rank, size = self.numbers(name, size_name)
        check_rank(name, rank, size_name, size, self._launcher)
        return rank, size

    def meeting_point(self, addr: str = "MASTER_ADDR", port: str = "MASTER_PORT") -> Master:
        """The address and port, which belong together; neither is fine."""
        if addr not in self and port not in self:
            return master_at(None, None)
        if addr not in self:
            raise WorldError(f"{addr} is not set, but {port} is {self.text(port)}: {self._launcher}")
        return master_at(self.text(addr), self.port(port))

    def place(self, rank: int, size: int, addr: str | None) -> Place:
        """Where on the nodes this rank is, when only LOCAL_RANK may tell, or the master's address."""
        if "LOCAL_RANK" not in self and addr is not None and not is_loopback(addr):
            return {"local_rank": 0, "local_world_size": 1, "node_rank": rank, "num_nodes": size}
        together = addr is None or is_loopback(addr)
        local_rank = self.number("LOCAL_RANK", default=rank)
        local_size = self.number("LOCAL_WORLD_SIZE", default=size if together else 0)
        if local_size:
            check_rank("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_size, self._launcher)
        if together:
            return {"local_rank": local_rank, "local_world_size": local_size, "node_rank": 0, "num_nodes": 1}
        nodes = size // local_size if local_size and size % local_size == 0 else 0
        node = (rank - local_rank) // local_size if nodes else -1
        return {"local_rank": local_rank, "local_world_size": local_size, "node_rank": node, "num_nodes": nodes}


def check_rank(name: str, rank: int, size_name: str, size: int, advice: str = "") -> None:
    if isinstance(rank, bool) or not isinstance(rank, int) or not isinstance(size, int):
        raise WorldError(f"{name}={rank!r} and {size_name}={size!r} must both be whole numbers")
    if size < 1 or not 0 <= rank < size:
        advice = advice or "ranks go from 0 to one less than the size"
        raise WorldError(f"{name} is {rank} and {size_name} is {size}, which cannot be: {advice}")


def job_port(number: int) -> int:
    """A port that all processes of a job derive alike. Below the ephemeral range, where it could be taken."""
    return 20000 + number % 12000

"""Collectives on the control plane: any dtype, exact, in every mode.

A KVStore only sums, rounds float64, dies of integers, and in dist_async has no sum at all. The control plane is slower
for large arrays, so gradients and parameters do not come this way.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from unidist.plugin import Peers, Reduction

AT_ONCE = 4 << 20  # bytes of all ranks together that travel with the meeting itself
CHUNK = 8 << 20
REDUCE = {"sum": np.add, "min": np.minimum, "max": np.maximum}


class Exchange:
    """Every rank calls the same methods in the same order, with data of the same size. None: there is only one."""

    def __init__(self, peers: Peers | None, timeout: float) -> None:
        self._peers, self._timeout = peers, timeout
        self._meetings = 0
        self._left_behind: list[str] = []  # keys of ours that the others may still be reading

    def meet(self, value: Any = None) -> list[Any]:
        """What each rank says, in JSON."""
        if self._peers is None:
            return [value]
        said = self._peers.gather(self._next(), value, self._timeout)
        self._all_are_here()
        return said

    def gather(self, data: bytes) -> list[bytes]:
        if self._peers is None:
            return [data]
        if len(data) * self._peers.size <= AT_ONCE:
            return self._gather_at_once(data)
        get = self._share(data, give=True)
        return [data if rank == self._peers.rank else get(rank) for rank in range(self._peers.size)]

    def broadcast(self, data: bytes, source: int) -> bytes:
        """The data of one rank; the others give something of the same size."""
        if self._peers is None:
            return data
        give = self._peers.rank == source
        if len(data) <= AT_ONCE:
            return self._gather_at_once(data if give else b"")[source]
        get = self._share(data, give)
        return data if give else get(source)

    def reduce(self, array: np.ndarray, op: Reduction) -> np.ndarray:
        """Reduce in the order of ranks, so that all of them get the same to the last bit."""
        if array.dtype == np.bool_ and op == "sum":
            array = array.astype(np.int64)
        parts = [np.frombuffer(received, array.dtype) for received in self.gather(array.tobytes())]
        return np.array(functools.reduce(REDUCE[op], parts)).reshape(array.shape)

    def _next(self) -> str:
        self._meetings += 1
        return f"mxnet/{self._meetings}"

    def _all_are_here(self) -> None:
        """So everybody has read what came with the last meeting."""
        assert self._peers is not None
        for old in self._left_behind:
            self._peers.control.delete(old)
        self._left_behind = []

    def _gather_at_once(self, data: bytes) -> list[bytes]:
        assert self._peers is not None
        said = self._peers.gather_bytes(self._next(), data, self._timeout)
        self._all_are_here()
        return said

    def _share(self, data: bytes, give: bool) -> Any:
        """Lay out data that is too large for a meeting; the result gets what another rank laid out."""
        peers = self._peers
        assert peers is not None
        place, chunks = peers.key(f"mxnet/{self._meetings + 1}"), range(-(-len(data) // CHUNK))
        mine = [f"{place}/{peers.rank}/{n}" for n in chunks] if give else []
        for n, key in enumerate(mine):
            peers.control.put(key, data[n * CHUNK : (n + 1) * CHUNK])
        self.meet()
        self._left_behind = mine

        def get(rank: int) -> bytes:
            parts = [peers.control.get(f"{place}/{rank}/{n}") for n in chunks]
            assert None not in parts, f"rank {rank} brought less data than rank {peers.rank}"
            return b"".join(part for part in parts if part is not None)

        return get

"""Collectives on the control plane: any dtype, exact, in every mode.

A KVStore only sums, rounds float64, dies of integers, and in dist_async has no sum at all. The control plane is slower
for large arrays, so gradients and parameters do not come this way.
"""

from __future__ import annotations

import base64
import functools
from typing import Any

import numpy as np

from unidist.backend import Reduction
from unidist.control import Control

INLINE = 1 << 16  # bytes up to which the values travel with the meeting itself
CHUNK = 8 << 20
REDUCE = {"sum": np.add, "min": np.minimum, "max": np.maximum}


class Exchange:
    """Every rank calls the same methods in the same order, with data of the same size. None: there is only one."""

    def __init__(self, control: Control | None, rank: int, size: int, timeout: float) -> None:
        self._control, self._rank, self._size, self._timeout = control, rank, size, timeout
        self._meetings = 0
        self._left_behind: list[str] = []  # keys of ours that the others may still be reading

    def close(self) -> None:
        if self._control is not None:
            self._control.close()

    def meet(self, value: Any = None) -> list[Any]:
        """What each rank says, in JSON."""
        if self._control is None:
            return [value]
        said = self._control.gather(f"mxnet/{self._meetings}", self._rank, self._size, value, self._timeout)
        self._meetings += 1
        # Everybody is here, so everybody has read what came with the last meeting.
        for old in self._left_behind:
            self._control.delete(old)
        self._left_behind = []
        return said

    def gather(self, data: bytes) -> list[bytes]:
        if self._control is None:
            return [data]
        if len(data) <= INLINE:
            return [base64.b64decode(each) for each in self.meet(base64.b64encode(data).decode())]
        get = self._share(data, give=True)
        return [data if rank == self._rank else get(rank) for rank in range(self._size)]

    def broadcast(self, data: bytes, source: int) -> bytes:
        """The data of one rank; the others give something of the same size."""
        if self._control is None:
            return data
        give = self._rank == source
        if len(data) <= INLINE:
            return base64.b64decode(self.meet(base64.b64encode(data).decode() if give else None)[source])
        get = self._share(data, give)
        return data if give else get(source)

    def reduce(self, array: np.ndarray, op: Reduction) -> np.ndarray:
        """In the order of ranks, so that all of them get the same to the last bit."""
        if array.dtype == np.bool_ and op == "sum":
            array = array.astype(np.int64)
        parts = [np.frombuffer(each, array.dtype) for each in self.gather(array.tobytes())]
        return np.array(functools.reduce(REDUCE[op], parts)).reshape(array.shape)

    def _share(self, data: bytes, give: bool) -> Any:
        """Lay out data that is too large for a meeting; the result gets what another rank laid out."""
        control, meeting = self._control, self._meetings
        assert control is not None
        chunks = range(-(-len(data) // CHUNK))
        mine = [f"mxnet/{meeting}/{self._rank}/{n}" for n in chunks] if give else []
        for n, key in enumerate(mine):
            control.put(key, data[n * CHUNK : (n + 1) * CHUNK])
        self.meet()
        self._left_behind = mine

        def get(rank: int) -> bytes:
            parts = [control.get(f"mxnet/{meeting}/{rank}/{n}") for n in chunks]
            assert None not in parts, f"rank {rank} brought less data than rank {self._rank}"
            return b"".join(part for part in parts if part is not None)

        return get

"""Gluon models over Horovod behind the contract of `unidist.backend`.

The models are the mxnet backend's; the two carriers that they ask for are here.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import horovod.mxnet as hvd
import mxnet as mx
import numpy as np
from mxnet import nd

from unidist import Capabilities, World
from unidist.backend import Reduction
from unidist.errors import RanksDisagree
from unidist_horovod import HorovodOptions, meeting, plugin
from unidist_horovod.meeting import SHUT_DOWN, Meeting, translated
from unidist_mxnet import plugin as mxnet
from unidist_mxnet.arrays import from_numpy
from unidist_mxnet.models import MxnetModels

REDUCE = {"sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max}
PROMISED: Capabilities = replace(
    mxnet.capabilities,
    sync_batchnorm=(
        "neither MXNet nor Horovod has it for Gluon over processes: make the batch of each rank larger, or use "
        "framework='torch'"
    ),
    compression="it is there for torch models only: use framework='torch', or accumulate= to send less often",
    gpu=plugin.capabilities.gpu,
)


GROUP = 1 << 20  # bytes; so much is sent at once, while backward works on the rest


class MxnetOverHorovod(MxnetModels):
    capabilities = PROMISED

    def __init__(self, world: World, options: HorovodOptions, device: str | None, timeout: float) -> None:
        super().__init__(world, options, device)
        self._meeting = Meeting(hvd, _barrier, mx.MXNetError, world, options, timeout)
        self.world = self._meeting.world
        self.transport, self.version = self._meeting.transport, f"on mxnet {mx.__version__}"
        size = self.world.world_size
        self.carry_by(HorovodStore(size), HorovodExchange(self.world.rank, size))

    def close(self, failed: bool) -> None:
        if not failed:
            try:
                nd.waitall()
            except mx.MXNetError as error:
                if SHUT_DOWN not in str(error):  # else leaving says it, in our words
                    raise
        self._meeting.leave(failed)


class HorovodStore:
    """In place of a KVStore."""

    rounds_dtypes, rank_0_leads = False, True

    def __init__(self, size: int) -> None:
        self.kv = self if size > 1 else None
        self.workers = size
        self._names: list[str] = []  # by key
        self._groups: dict[int, list[tuple[list[int], str]]] = {}  # of gradients, by the first key of their model

    def keys(self, names: Sequence[str]) -> list[int]:
        first = len(self._names)
        self._names += names
        return list(range(first, len(self._names)))

    def start(self, keys: list[int], arrays: Sequence[nd.NDArray], out: Sequence[Any]) -> None:
        for key, array in zip(keys, arrays, strict=True):
            if array.size:
                hvd.broadcast_(array, 0, name=f"start of parameter {key}, {self._names[key]}")

    def sum_gradients(self, keys: list[int], gradients: list[list[nd.NDArray]]) -> None:
        if not keys:
            return
        if keys[0] not in self._groups:
            self._groups[keys[0]] = self._grouped(keys, [own for (own,) in gradients])
        for members, name in self._groups[keys[0]]:
            own = [gradients[n][0] for n in members]
            hvd.grouped_allreduce_(own, op=hvd.Sum, name=name, priority=-members[0])

    def _grouped(self, keys: list[int], arrays: list[nd.NDArray]) -> list[tuple[list[int], str]]:
        """Neighbours that travel together, those of the last layers first, as backward makes them. One by one they come
        to Horovod at different moments, and each of these waits for a cycle of its own."""
        groups: list[list[int]] = []
        room, dtype = 0, None
        for n, array in reversed(list(enumerate(arrays))):
            if not array.size:
                continue
            if room <= 0 or array.dtype is not dtype:
                groups.append([])
                room, dtype = GROUP, array.dtype
            groups[-1].insert(0, n)
            room -= array.size * np.dtype(dtype).itemsize
        ends = [(keys[each[0]], keys[each[-1]]) for each in groups]
        names = [f"gradients {a} to {b}, {self._names[a]} to {self._names[b]}" for a, b in ends]
        return list(zip(groups, names, strict=True))

    def sum(self, key: int, array: nd.NDArray, priority: int, exchange: Any) -> None:
        hvd.allreduce_(array, op=hvd.Sum, name=f"average {key}, {self._names[key]}", priority=priority)


class HorovodExchange:
    """In place of the control plane. Everything is waited for here, so that an error is this operation's."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def meet(self) -> None:
        with self._translated("barrier"):
            _barrier()

    def gather(self, data: bytes) -> list[bytes]:
        if not data:
            return [data] * self._size
        gathered = []
        for piece in _pieces(data, max(1, meeting.MOST_BYTES // self._size)):
            with self._translated("all_gather"):
                rows = hvd.allgather(piece.reshape((1, -1)), name="all_gather").asnumpy()
            if rows.shape != (self._size, piece.size):
                raise RanksDisagree(f"all_gather of {len(data)} bytes on rank {self._rank}, of others on another rank")
            gathered.append(rows)
        return [b"".join(row.tobytes() for row in rows) for rows in zip(*gathered, strict=True)]

    def broadcast(self, data: bytes, source: int) -> bytes:
        if not data:
            return data
        with self._translated("broadcast"):
            name = f"broadcast from {source}"
            pieces = [hvd.broadcast(each, source, name=name).asnumpy() for each in _pieces(data, meeting.MOST_BYTES)]
        return b"".join(each.tobytes() for each in pieces)

    def reduce(self, array: np.ndarray, op: Reduction) -> np.ndarray:
        if not array.size:
            return array
        carried = array.reshape(-1)
        if array.dtype.kind in "biu":  # Horovod adds up int32 and int64
            carried = carried.astype(np.int64)
        with self._translated(f"all_reduce {op}"):
            tensor = from_numpy(carried, mx.cpu())
            result = hvd.allreduce(tensor, op=REDUCE[op], name=f"all_reduce {op}").asnumpy().reshape(array.shape)
        return result if array.dtype == np.bool_ and op == "sum" else result.astype(array.dtype)

    def _translated(self, what: str) -> AbstractContextManager[None]:
        return translated(what, self._rank, mx.MXNetError)


def _pieces(data: bytes, size: int) -> list[nd.NDArray]:
    whole = np.frombuffer(data, np.uint8)
    return [from_numpy(whole[first : first + size], mx.cpu()) for first in range(0, len(whole), size)]


def _barrier() -> None:
    """horovod.mxnet has none."""
    hvd.allreduce(nd.zeros(1), op=hvd.Sum, name="barrier").wait_to_read()

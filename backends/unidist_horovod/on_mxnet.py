"""Gluon models over Horovod behind the contract of `unidist.backend`.

All but the communication is that of the mxnet backend, which speaks to its KVStore and its exchange of small values
through the two classes here.
"""

from __future__ import annotations

import weakref
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
from unidist_horovod import HorovodOptions, plugin
from unidist_horovod.meeting import Meeting, translated
from unidist_mxnet import plugin as mxnet
from unidist_mxnet.arrays import from_numpy
from unidist_mxnet.backend import MxnetBackend
from unidist_mxnet.devices import pick_contexts

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


class MxnetOverHorovod(MxnetBackend):
    capabilities = PROMISED

    def __init__(self, world: World, options: HorovodOptions, device: str | None, timeout: float) -> None:
        self.options, self.version = options, f"on mxnet {mx.__version__}"
        contexts = pick_contexts(device, 1, mx.context.num_gpus(), world)
        self._contexts = [mx.Context(kind, index) for kind, index in contexts]
        self.device, self.devices = str(self._contexts[0]), 1
        self._meeting = Meeting(hvd, _barrier, world, options, timeout)
        self.world, self.transport = self._meeting.world, self._meeting.transport
        self._trained = weakref.WeakKeyDictionary()
        self._store = HorovodStore(self.world.rank, self.world.world_size)
        self._exchange = HorovodExchange(self.world.rank, self.world.world_size)
        self._rank_0_leads, self._server_memory = True, []

    def close(self, failed: bool) -> None:
        if not failed:
            nd.waitall()
        self._meeting.leave(failed)


class HorovodStore:
    """What the mxnet backend asks of a KVStore: a sum over ranks by key, and rank 0's values at the start."""

    distributed = False  # there are no servers, and no dtype is rounded on the way

    def __init__(self, rank: int, size: int) -> None:
        self.kv = self if size > 1 else None
        self.rank, self.workers, self._next_key = rank, size, 0

    def keys(self, count: int) -> list[int]:
        """New ones; every rank asks in the same order."""
        first = self._next_key
        self._next_key += count
        return list(range(first, first + count))

    def start(self, keys: list[int], arrays: Sequence[nd.NDArray], out: Sequence[Any]) -> None:
        for key, array in zip(keys, arrays, strict=True):
            if array.size:
                hvd.broadcast_(array, 0, name=f"start of parameter {key}")

    def pushpull(self, key: int, values: list[nd.NDArray], out: list[nd.NDArray], priority: int) -> None:
        hvd.allreduce_(values[0], op=hvd.Sum, name=f"gradient {key}", priority=priority)

    def sum(self, key: int, array: nd.NDArray, priority: int, exchange: Any) -> None:
        hvd.allreduce_(array, op=hvd.Sum, name=f"average {key}", priority=priority)


class HorovodExchange:
    """Collectives on numpy arrays and bytes. They are waited for here, so that an error is this operation's."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def meet(self, value: Any = None) -> list[Any]:
        with self._translated("barrier"):
            _barrier()
        return [value] * self._size

    def gather(self, data: bytes) -> list[bytes]:
        if not data:
            return [data] * self._size
        with self._translated("all_gather"):
            rows = hvd.allgather(_array(data).reshape((1, -1)), name="all_gather").asnumpy()
        if rows.shape != (self._size, len(data)):
            raise RanksDisagree(f"all_gather of {len(data)} bytes on rank {self._rank}, of others on another rank")
        return [row.tobytes() for row in rows]

    def broadcast(self, data: bytes, source: int) -> bytes:
        if not data:
            return data
        with self._translated("broadcast"):
            return hvd.broadcast(_array(data), source, name=f"broadcast from {source}").asnumpy().tobytes()

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

    def close(self) -> None:
        pass

    def _translated(self, what: str) -> AbstractContextManager[None]:
        return translated(what, self._rank, mx.MXNetError)


def _array(data: bytes) -> nd.NDArray:
    return from_numpy(np.frombuffer(data, np.uint8), mx.cpu())


def _barrier() -> None:
    """horovod.mxnet has none."""
    hvd.allreduce(nd.zeros(1), op=hvd.Sum, name="barrier").wait_to_read()

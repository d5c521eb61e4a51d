"""Gluon models over Horovod behind the contract of `unidist.backend`.

The models are the mxnet backend's; the two carriers that they ask for are here.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import horovod.mxnet as hvd
import mxnet as mx
import numpy as np
from mxnet import nd
from mxnet.base import _LIB

from unidist.plugin import RanksDisagree, Reduction, World, end_process, ending, parting
from unidist_horovod import ON_MXNET, HorovodOptions, meeting
from unidist_horovod.meeting import SHUT_DOWN, Meeting, translated
from unidist_mxnet.arrays import from_numpy
from unidist_mxnet.models import MxnetModels

REDUCE = {"sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max}


GROUP = 1 << 20  # bytes; so much is sent at once, while backward works on the rest


class MxnetOverHorovod(MxnetModels):
    capabilities = ON_MXNET

    def __init__(self, world: World, options: HorovodOptions, device: str | None, timeout: float) -> None:
        super().__init__(world, options, device)
        self._meeting = Meeting(hvd, _barrier, mx.MXNetError, world, options, timeout)
        atexit.register(self._at_exit)  # after Horovod's own, so it is called before that shuts down
        _open.add(self)
        self.world = self._meeting.world
        self.transport, self.version = self._meeting.transport, f"on mxnet {mx.__version__}"
        size = self.world.world_size
        self.carry_by(HorovodStore(self.world.rank, size), HorovodExchange(self.world.rank, size))

    def translated(self, what: str) -> AbstractContextManager[None]:
        return translated(what, self.world.rank, mx.MXNetError)

    def close(self, failed: bool) -> None:
        _open.discard(self)
        atexit.unregister(self._at_exit)
        self.release()
        if not failed:
            try:
                nd.waitall()
            except mx.MXNetError as error:
                if SHUT_DOWN not in str(error):  # else leaving says it, in our words
                    raise
        else:
            # What is still queued fails once Horovod is gone. MXNet would raise that at the end of the process, as if
            # it were the cause.
            atexit.unregister(mx.base._notify_shutdown)
            atexit.register(_LIB.MXNotifyShutdown)
        self._meeting.leave(failed)

    def _at_exit(self) -> None:
        """A script may end without closing its Strategy, while its steps are still queued, which need all ranks."""
        if getattr(sys, "last_value", None) is not None:
            return
        if self.world.peers is not None and parting.all_at_their_end(self.world.peers) != "exits":
            end_process(ending.code())
        try:
            nd.waitall()
        except mx.MXNetError:  # in a step that nobody has read
            traceback.print_exc()
            end_process(ending.code() or 1)


class HorovodStore:
    """In place of a KVStore."""

    rounds_dtypes, rank_0_leads, compressed = False, True, False

    def __init__(self, rank: int, size: int) -> None:
        self.kv = self if size > 1 else None
        self._rank, self.workers = rank, size
        self._names: list[str] = []  # by key

    def keys(self, names: Sequence[str]) -> list[int]:
        first = len(self._names)
        self._names += names
        return list(range(first, len(self._names)))

    def start(self, keys: list[int], arrays: Sequence[nd.NDArray], out: Sequence[Any]) -> None:
        """The values of rank 0, as a sum with zeros. Not by Horovod's broadcast, which reads the operation's name once
        more when it is queued already: MXNet may have freed that by then (EnqueueTensorBroadcast in operations.cc)."""
        for key, array in zip(keys, arrays, strict=True):
            if array.size:
                if self._rank != 0:
                    array[:] = 0
                hvd.allreduce_(array, op=hvd.Sum, name=f"start of parameter {key}, {self._names[key]}")

    def summing(self, keys: list[int], arrays: Sequence[list[nd.NDArray]]) -> Callable[[], None]:
        grouped = self._grouped(keys, [array for (array,) in arrays])
        groups = [([arrays[n][0] for n in members], name, -members[0]) for members, name in grouped]

        def sum_up() -> None:
            for group, name, priority in groups:
                hvd.grouped_allreduce_(group, op=hvd.Sum, name=name, priority=priority)

        return sum_up

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
        ends = [(keys[group[0]], keys[group[-1]]) for group in groups]
        names = [f"gradients {a} to {b}, {self._names[a]} to {self._names[b]}" for a, b in ends]
        return list(zip(groups, names, strict=True))

    def start_sum(self, key: int, array: nd.NDArray) -> None:
        pass

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
        """As a sum with zeros of the other ranks, see `HorovodStore.start`. Whole numbers add up to the last bit."""
        if not data:
            return data
        words = np.zeros(-(-len(data) // 4), np.int32)
        if self._rank == source:
            words.view(np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)
        most, parts = meeting.MOST_BYTES // 4, []
        with self._translated("broadcast"):
            for first in range(0, len(words), most):
                part = from_numpy(words[first : first + most], mx.cpu())
                parts.append(hvd.allreduce(part, op=hvd.Sum, name=f"broadcast from {source}").asnumpy())
        return b"".join(part.tobytes() for part in parts)[: len(data)]

    def reduce(self, array: np.ndarray, op: Reduction) -> np.ndarray:
        if not array.size:
            return array
        carried = array.reshape(-1)
        if array.dtype.kind in "biu":  # Horovod adds up int32 and int64
            carried = carried.astype(np.int64)
        with self._translated(f"all_reduce {op}"):
            tensor = from_numpy(carried, mx.cpu())
            summed = hvd.allreduce(tensor, op=REDUCE[op], name=f"all_reduce {op}")
            result: np.ndarray = summed.asnumpy().reshape(array.shape)
        return result if array.dtype == np.bool_ and op == "sum" else result.astype(array.dtype)

    def _translated(self, what: str) -> AbstractContextManager[None]:
        return translated(what, self._rank, mx.MXNetError)


def _pieces(data: bytes, size: int) -> list[nd.NDArray]:
    whole = np.frombuffer(data, np.uint8)
    return [from_numpy(whole[first : first + size], mx.cpu()) for first in range(0, len(whole), size)]


_open: weakref.WeakSet[MxnetOverHorovod] = weakref.WeakSet()


def _before_fork() -> None:
    """MXNet stops its engine before a fork, and waits for what runs in it: an exchange that another rank never answers
    when its engine has been stopped with that exchange still in the queue. So all of them are made first."""
    if _open:
        with contextlib.suppress(mx.MXNetError):  # whoever reads a result is told
            nd.waitall()


def _in_child() -> None:
    """Horovod's thread is not there, and its end would wait for it."""
    atexit.unregister(hvd.shutdown)
    for backend in _open:
        atexit.unregister(backend._at_exit)


os.register_at_fork(before=_before_fork, after_in_child=_in_child)


def _barrier() -> None:
    """horovod.mxnet has none."""
    hvd.allreduce(nd.zeros(1), op=hvd.Sum, name="barrier").wait_to_read()

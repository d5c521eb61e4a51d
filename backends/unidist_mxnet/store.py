"""The KVStore of a worker: made in time or not at all, spoken to in keys, and left without hanging."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, check_call
from mxnet.kvstore.base import _ctype_key_value

from unidist.plugin import BackendUnavailable, Peers, UsageError, World, end_process, ending, parting
from unidist_mxnet import MxnetOptions, cluster

TOGETHER = 1 << 18  # numbers that go in one call; what comes first is needed first, and a call has one priority
CARD = 512  # bytes that rank 0 can tell everybody before anything else works


class Store:
    """`kv` is None when there is one worker with one device: nothing has to be exchanged then."""

    def __init__(self, world: World, options: MxnetOptions, devices: int, timeout: float) -> None:
        self.name = cluster.store_name(options)
        self.distributed = self.name.startswith("dist")
        self.workers = world.world_size if self.distributed else 1
        self.rank, self.rank_0_leads, self._next_key = 0, True, 0
        self.rounds_dtypes = self.distributed
        self.compressed = options.compression != "none"
        self.kv: Any = None
        self._failed = False  # it was left after an error, so the others may not be there any more
        if self.distributed:
            self._start(world, options, timeout)
        elif options.server_updates:
            raise UsageError("update_on='server' needs servers: start with `unidist run --backend mxnet --servers M …`")
        elif devices > 1:
            self.kv = mx.kv.create(self.name)

    def _start(self, world: World, options: MxnetOptions, timeout: float) -> None:
        if not mx.runtime.Features().is_enabled("DIST_KVSTORE"):
            raise BackendUnavailable(
                f"this build of MXNet {mx.__version__} has no distributed KVStore (DIST_KVSTORE is off): "
                "run `python -m unidist setup mxnet`, or build MXNet with USE_DIST_KVSTORE=1"
            )
        cluster.tell_addresses(world)
        os.environ.setdefault("MXNET_KVSTORE_BIGARRAY_BOUND", str(options.bigarray_bound))
        where = f"{os.environ['DMLC_PS_ROOT_URI']}:{os.environ['DMLC_PS_ROOT_PORT']}"
        roles = f"{world.world_size} workers and {os.environ.get('DMLC_NUM_SERVER')} servers"
        with _deadline(
            timeout,
            f"unidist: CommunicationError: this worker could not meet the others at the scheduler {where} within "
            f"{timeout:g} s. Are the scheduler, {roles} started, and can this host reach that address?",
        ):
            self.kv = mx.kv.create(self.name)
        self.rank = self.kv.rank
        if self.compressed:
            self.kv.set_gradient_compression({"type": options.compression, "threshold": options.compression_threshold})
        # At the end of the interpreter the library would wait for ranks that wait for this one.
        self._shortcut = ending.Shortcut(self._cannot_wait, skipped=(mx.base._notify_shutdown, self._at_exit))
        ending.offer(self._shortcut)

    # -- keys -------------------------------------------------------------------------------------------------

    def keys(self, names: Sequence[str]) -> list[int]:
        """New ones; every worker asks in the same order."""
        first = self._next_key
        self._next_key += len(names)
        return list(range(first, self._next_key))

    def start(self, keys: list[int], arrays: Sequence[mx.nd.NDArray], out: Sequence[Any]) -> None:
        """Give the keys the values that KVStore rank 0 has, and pull them."""
        self.kv.init(keys, list(arrays))
        self.kv.pull(keys, out=list(out))

    def summing(self, keys: list[int], arrays: Sequence[list[mx.nd.NDArray]]) -> Callable[[], None]:
        return self.pushing(keys, arrays, arrays)

    def pushing(
        self, keys: list[int], values: Sequence[list[mx.nd.NDArray]], out: Sequence[list[mx.nd.NDArray]]
    ) -> Callable[[], None]:
        """What pushes the values and pulls the results whenever it is called. Neighbours go in one call of the library,
        whose arguments are made here: Python would take longer over small arrays than the network."""
        calls = [self._pushing(keys[a:b], values[a:b], out[a:b], -a) for a, b in _neighbours(values)]

        def push() -> None:
            for call in calls:
                call()

        return push

    def _pushing(
        self, keys: list[int], values: Sequence[Any], out: Sequence[Any], priority: int
    ) -> Callable[[], object]:
        kv = self.kv
        if self.compressed:  # only a push compresses
            return lambda: (kv.push(keys, values, priority=priority), kv.pull(keys, out=out, priority=priority))
        c_keys, c_values, _ = _ctype_key_value(keys, values)
        _, c_out, _ = _ctype_key_value(keys, out)
        count = ctypes.c_uint(len(c_keys))
        arguments = (kv.handle, count, c_keys, count, c_keys, c_values, c_out, ctypes.c_int(priority))

        def call(_arrays_that_must_stay: object = (values, out)) -> None:
            check_call(_LIB.MXKVStorePushPull(*arguments))

        return call

    def start_sum(self, key: int, array: mx.nd.NDArray) -> None:
        self.kv.init(key, array)

    def sum(self, key: int, array: mx.nd.NDArray, priority: int, exchange: Any) -> None:
        """Over all workers, in place. Not through a compressed store: only gradients bear that."""
        if self.kv is not None and not self.compressed:
            self.kv.pushpull(key, array, priority=priority)
        else:
            array[:] = mx.nd.array(exchange.reduce(array.asnumpy(), "sum"), dtype=array.dtype)

    def tell_all(self, card: bytes) -> bytes:
        """The card of KVStore rank 0, on every worker."""
        numbers = np.zeros(CARD, dtype=np.float32)
        numbers[: len(card)] = np.frombuffer(card, dtype=np.uint8)
        array = mx.nd.array(numbers)
        self.start(self.keys(["card"]), [array], [array])
        return bytes(array.asnumpy().astype(np.uint8)).rstrip(b"\0")

    def command(self, do: str, keys: list[int], **said: Any) -> None:
        """Tell every server; returns when they have done it."""
        self.kv._send_command_to_servers(0, json.dumps({"do": do, "keys": keys, **said}))

    # -- leaving ----------------------------------------------------------------------------------------------

    def close(self, failed: bool) -> None:
        if not self.distributed:
            self.kv = None
            return
        cluster.store_was_closed = True
        if failed:
            self._failed = True
            ending.note_the_end()
            return
        ending.withdraw(self._shortcut)
        atexit.unregister(self._at_exit)
        mx.nd.waitall()
        handle, self.kv.handle = self.kv.handle, ctypes.c_void_p()
        check_call(_LIB.MXKVStoreFree(handle))  # now, and not whenever the last reference goes: all leave together
        self.kv = None

    def outlast(self, peers: Peers) -> None:
        """From now on the end of a script that has not closed its Strategy waits for the other ranks' ends."""
        self._peers = peers
        atexit.register(self._at_exit)  # after mxnet's, so it runs before it

    def _at_exit(self) -> None:
        """Steps may be queued, which need all ranks and the store: MXNet's own way out takes it down beneath them, and
        waits for ever."""
        if parting.all_at_their_end(self._peers) != "exits":  # else the store would wait for those who gave up
            end_process(ending.code())
        try:
            mx.nd.waitall()
        except mx.MXNetError:  # in a step that nobody has read
            traceback.print_exc()
            end_process(ending.code() or 1)
        self._peers.control.on_loss = lambda why: None  # the scheduler, which hosts the meeting, goes with the stores
        self.close(failed=False)

    def _cannot_wait(self, uncaught: BaseException | None) -> bool:
        return self._failed or uncaught is not None


def _neighbours(arrays: Sequence[list[mx.nd.NDArray]]) -> list[tuple[int, int]]:
    """Where each group of them begins and ends."""
    begins, room = [], 0
    for n, (first, *_) in enumerate(arrays):
        if room <= 0:
            begins.append(n)
            room = TOGETHER
        room -= first.size
    return list(zip(begins, [*begins[1:], len(arrays)], strict=True))


@contextlib.contextmanager
def _deadline(seconds: float, message: str) -> Iterator[None]:
    """Inside, the library may wait for ever, and no exception can reach it: only the end of the process."""

    def end() -> None:
        sys.stderr.write(message + "\n")
        sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()

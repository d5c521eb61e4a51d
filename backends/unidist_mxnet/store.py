"""The KVStore of a worker: made in time or not at all, spoken to in keys, and left without hanging."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, check_call

from unidist.errors import BackendUnavailable, StateError, UsageError
from unidist.world import World
from unidist_mxnet import MxnetOptions
from unidist_mxnet.cluster import Lookout, with_defaults

CARD = 512  # bytes that rank 0 can tell everybody before anything else works
_finished = False  # ps-lite cannot be started twice in one process


class Store:
    """`kv` is None when there is one worker with one device: nothing has to be exchanged then."""

    def __init__(self, world: World, options: MxnetOptions, devices: int, timeout: float) -> None:
        self.name = options.kvstore
        if self.name == "auto":
            self.name = "dist_sync" if "DMLC_ROLE" in os.environ else "local"
        self.distributed = self.name.startswith("dist")
        self.workers = world.world_size if self.distributed else 1
        self.rank, self.rank_0_leads, self._next_key = 0, True, 0
        self.rounds_dtypes = self.distributed
        self.compressed = options.compression != "none"
        self._lookout: Lookout | None = None
        self.kv: Any = None
        if self.distributed:
            self._meet(world, options, timeout)
        elif options.server_updates:
            raise UsageError("update_on='server' needs servers: start with `unidist run --backend mxnet --servers M …`")
        elif world.world_size > 1:
            raise UsageError(f"kvstore {self.name!r} is for one worker, and here are {world.world_size}: use dist_sync")
        elif devices > 1:
            self.kv = mx.kv.create(self.name)

    def _meet(self, world: World, options: MxnetOptions, timeout: float) -> None:
        if "DMLC_ROLE" not in os.environ:
            raise UsageError(
                f"kvstore {self.name!r} needs a scheduler and servers: start with `unidist run --backend mxnet "
                "--nproc N --servers M …`, or with MXNet's own variables (DMLC_ROLE, DMLC_PS_ROOT_URI, …)"
            )
        if not mx.runtime.Features().is_enabled("DIST_KVSTORE"):
            raise BackendUnavailable(
                f"this build of MXNet {mx.__version__} has no distributed KVStore (DIST_KVSTORE is off): "
                "run `python -m unidist setup mxnet`, or build MXNet with USE_DIST_KVSTORE=1"
            )
        if _finished:
            raise StateError(
                "a distributed KVStore was closed in this process, and MXNet cannot make a second one: keep one "
                "Strategy for the whole script, or start a new process"
            )
        with_defaults(os.environ)
        bound = os.environ.setdefault("MXNET_KVSTORE_BIGARRAY_BOUND", str(options.bigarray_bound))
        if options.bigarray_bound not in (MxnetOptions.bigarray_bound, int(bound)):
            raise UsageError(
                f"bigarray_bound is {options.bigarray_bound} here, and the job was started with {bound}: say it to "
                f"`unidist run --option bigarray_bound={options.bigarray_bound}`, or in MXNET_KVSTORE_BIGARRAY_BOUND"
            )
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
        if "UNIDIST_CONTROL" not in os.environ:
            self._lookout = Lookout(world, met=True).__enter__()
        self._hook = _leave_at_once_after_an_error()

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

    def pushpull(self, key: int, values: list[mx.nd.NDArray], out: list[mx.nd.NDArray], priority: int) -> None:
        if self.compressed:  # only a push compresses
            self.kv.push(key, values, priority=priority)
            self.kv.pull(key, out=out, priority=priority)
        else:
            self.kv.pushpull(key, values, out=None if out is values else out, priority=priority)

    def sum_gradients(self, keys: list[int], gradients: list[list[mx.nd.NDArray]]) -> None:
        for n, (key, own) in enumerate(zip(keys, gradients, strict=True)):
            self.pushpull(key, own, own, -n)

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
        global _finished
        if not self.distributed:
            self.kv = None
            return
        _finished = True
        if self._lookout is not None:
            self._lookout.__exit__(None, None, None)
        if failed:
            # The destructor would wait for everybody at the end of the process.
            check_call(_LIB.MXKVStoreSetBarrierBeforeExit(self.kv.handle, 0))
            atexit.register(_end_within, 5)
            return
        sys.excepthook = self._hook
        mx.nd.waitall()
        handle, self.kv.handle = self.kv.handle, ctypes.c_void_p()
        check_call(_LIB.MXKVStoreFree(handle))  # now, and not whenever the last reference goes: all leave together
        self.kv = None


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


def _leave_at_once_after_an_error() -> Any:
    """At the end of the interpreter the library would wait for ranks that wait for this one."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130 if issubclass(kind, KeyboardInterrupt) else 1)

    sys.excepthook = hook
    return before


def _end_within(seconds: int) -> None:
    """Should the library hang after all, the kernel ends us."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(seconds)

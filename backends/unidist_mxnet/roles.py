"""The scheduler and the servers of a job: what a process does whose role is not "worker".

Only MXNet's library is loaded, which takes a tenth of a second. Its Python package, which takes two seconds and would
itself serve at import, is left alone until a server has to apply updates.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import signal
import sys
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unidist.control import Control, connect_from_env
from unidist.errors import BackendUnavailable, UnidistError
from unidist.world import World, detect
from unidist_mxnet import MxnetOptions, memory
from unidist_mxnet.cluster import Lookout, watch_over_nodes, with_defaults

CONTROLLER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


def serve(world: World, options: MxnetOptions) -> None:
    """Be the scheduler or a server until the workers are done."""
    with_defaults(os.environ)
    # Blocked inside the library, Python would never run its own handler for Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    library = load_library()
    store = ctypes.c_void_p()
    _call(library, library.MXKVStoreCreate(b"dist", ctypes.byref(store)))
    commands = Commands(library, store, options)
    if world.role == "server" and options.server_updates:
        import_package()  # now, while the workers do the same
    controller = CONTROLLER(commands)
    if world.role == "server" and (control := connect_from_env()) is not None:
        memory.tell(control, world.rank, options.server_memory)
        control.close()
    by_hand = "UNIDIST_CONTROL" not in os.environ
    lookout = Lookout(world, met=False) if by_hand and world.role == "server" else None
    if by_hand and world.role == "scheduler":
        watch_over_nodes(library, store, world)
    with lookout or contextlib.nullcontext():
        _call(library, library.MXKVStoreRunServer(store, controller, None))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the job is over: no destructor of the library has anything left to do, or to wait for


class Commands:
    """What workers tell a server beside gradients: JSON, never a pickled object, so nobody can run code here."""

    def __init__(self, library: ctypes.CDLL, store: ctypes.c_void_p, options: MxnetOptions) -> None:
        self._library, self._store, self._options = library, store, options
        self._updates: Any = None

    def __call__(self, head: int, body: bytes, _: object) -> None:
        with fatal(f"the command {body[:200]!r}"):
            said = json.loads(body)
            if said["do"] == "answer":
                self._answer(*said["control"])
                return
            if self._updates is None:  # not earlier: the library takes an updater only once it serves
                self._updates = import_package().Updates(self._store)
            self._updates.command(said)

    def _answer(self, url: str, token: str) -> None:
        """Nobody's launcher: the workers have a control plane of their own, and ask who is there."""
        rank, control = ctypes.c_int(), Control(url, token)
        _call(self._library, self._library.MXKVStoreGetRank(self._store, ctypes.byref(rank)))
        memory.tell(control, rank.value, self._options.server_memory)
        control.close()


def import_package() -> types.ModuleType:
    """MXNet's Python package and what needs it. Left alone, it would serve at import with an updater of its own."""
    stub = types.ModuleType("mxnet.kvstore.kvstore_server")
    stub.__all__ = []  # type: ignore[attr-defined]
    sys.modules.setdefault(stub.__name__, stub)
    return importlib.import_module("unidist_mxnet.updates")


@contextlib.contextmanager
def fatal(what: str) -> Iterator[None]:
    """The library drops an exception of ours and goes on with wrong numbers: end the process instead."""
    try:
        yield
    except BaseException:
        traceback.print_exc()
        print(f"unidist: the server failed in {what}", file=sys.stderr, flush=True)
        os._exit(1)


def load_library() -> ctypes.CDLL:
    spec = importlib.util.find_spec("mxnet")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for folder in folders:
        if (Path(folder) / "libmxnet.so").exists():
            return ctypes.CDLL(str(Path(folder) / "libmxnet.so"), ctypes.RTLD_LOCAL)
    raise BackendUnavailable(
        f"MXNet's library libmxnet.so is not in {folders or sys.executable}: run `python -m unidist setup mxnet`"
    )


def _call(library: ctypes.CDLL, code: int) -> None:
    if code != 0:
        library.MXGetLastError.restype = ctypes.c_char_p
        said = (library.MXGetLastError() or b"").decode(errors="replace").splitlines()
        raise UnidistError(f"MXNet: {said[0] if said else 'unknown error'}")


def main() -> None:
    from unidist import registry

    plugin = registry.plugin("mxnet")
    options = registry.build_options(plugin, json.loads(os.environ.get("UNIDIST_OPTIONS") or "{}"))
    serve(detect(), options)


if __name__ == "__main__":
    main()

"""The scheduler and the servers of a job: what a process does whose role is not "worker".

Only MXNet's library is loaded, which takes a tenth of a second. Its Python package, which takes two seconds and would
itself serve at import, is left alone until a server has to apply updates.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib.util
import json
import os
import signal
import sys
import threading
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unidist.plugin import LONGEST_WAIT, BackendUnavailable, UnidistError, Watch, World, build_options, detect, facts
from unidist_mxnet import MxnetOptions, cluster, plugin

PATIENCE = 300.0  # seconds for which a service waits for the others
CONTROLLER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


def serve(world: World, options: MxnetOptions) -> None:
    """Be the scheduler or a server until the workers are done."""
    cluster.tell_addresses(world)
    # Blocked inside the library, Python would never run its own handler for Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    library = load_library()
    store = ctypes.c_void_p()
    _call(library, library.MXKVStoreCreate(b"dist", ctypes.byref(store)))
    if world.role == "server" and options.server_updates:
        import_package()  # now, while the workers do the same
    controller = CONTROLLER(Commands(store))
    _call(library, library.MXKVStoreRunServer(store, controller, None))
    # The job is over: no destructor of the library has anything left to do, or to wait for.
    sys.stdout.flush()
    sys.stderr.flush()
    atexit.register(os._exit, 0)


class Commands:
    """What workers tell a server beside gradients: JSON, never a pickled object, so nobody can run code here."""

    def __init__(self, store: ctypes.c_void_p) -> None:
        self._store = store
        self._updates: Any = None

    def __call__(self, head: int, body: bytes, _: object) -> None:
        with fatal(f"the command {body[:200]!r}"):
            if self._updates is None:  # not earlier: the library takes an updater only once it serves
                self._updates = import_package().Updates(self._store)
            self._updates.command(json.loads(body))


def import_package() -> types.ModuleType:
    """MXNet's Python package and what needs it. Left alone, it would serve at import with an updater of its own."""
    stub = types.ModuleType("mxnet.kvstore.kvstore_server")
    stub.__all__ = []  # type: ignore[attr-defined]
    sys.modules.setdefault(stub.__name__, stub)
    return importlib.import_module("unidist_mxnet.server_updater")


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
    """Without the user's script, so neither the script nor its options are compared with those of the workers."""
    options = build_options(plugin, json.loads(os.environ.get("UNIDIST_OPTIONS") or "{}"))
    world = detect()
    same = {name: said for name, said in facts(plugin, options).items() if name not in ("the script", "the options")}
    try:
        company = cluster.company(world, options)
        if world.source == "unidist":
            # A script of MXNet's alone never comes to the meeting, and is served all the same.
            watch = Watch(world, same, LONGEST_WAIT, company)
            threading.Thread(target=_meet, args=(watch,), daemon=True).start()
        else:
            watch = Watch(world, same, PATIENCE, company)
            world = watch.meet()
    except UnidistError as error:
        sys.exit(f"unidist: {type(error).__name__}: {error}")
    serve(world, options)
    watch.close()


def _meet(watch: Watch) -> None:
    """What is wrong is told to the workers, too: they fail, and the launcher ends the services with them. Where the
    workers never meet, a service that is done leaves the others alone at the meeting, which is no failure.
    """
    with contextlib.suppress(UnidistError):
        watch.meet()


if __name__ == "__main__":
    main()

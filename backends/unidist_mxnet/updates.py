"""Updates on a server: which optimizer moves which keys. Runs in a server process, called by the library."""

from __future__ import annotations

import ctypes
from typing import Any

import mxnet as mx

from unidist_mxnet.optimizers import from_description, set_rate
from unidist_mxnet.roles import fatal


class Updates:
    def __init__(self, handle: ctypes.c_void_p) -> None:
        self._updaters: dict[int, mx.optimizer.Updater] = {}
        self._assigning: set[int] = set()
        self._counters: set[int] = set()
        self._furthest: dict[int, int] = {}  # first key of a model -> number of the update its rate belongs to
        self._store = mx.kv.KVStore(handle)
        self._store._set_updater(self)

    def __call__(self, key: int, received: mx.nd.NDArray, held: mx.nd.NDArray) -> None:
        with fatal(f"the update of key {key}"):
            # The library frees messages once `held` is ready. An update that does not move `held`, as at rate 0, does
            # not wait until they are summed up; in dist_async `received` is the message itself, and still to be read.
            received = received.copy()
            received.wait_to_read()
            if key in self._counters:
                held += received
            elif key in self._updaters and key not in self._assigning:
                self._updaters[key](key, received, held)
            else:  # a plain exchange: what all workers together sent is what they get back
                received.copyto(held)

    def command(self, said: dict[str, Any]) -> None:
        match said["do"]:
            case "optimize":
                updater = mx.optimizer.get_updater(from_description(said["optimizer"]))
                self._updaters.update(dict.fromkeys(said["keys"], updater))
            case "rate":
                # Workers that are not in step each send theirs; the one that is furthest has the say.
                first = said["keys"][0]
                if said["update"] >= self._furthest.get(first, 0):
                    self._furthest[first] = said["update"]
                    set_rate(self._updaters[first].optimizer, said["rate"])
            case "assign":
                self._assigning.update(said["keys"])
            case "train":
                self._assigning.difference_update(said["keys"])
            case "count":
                self._counters.update(said["keys"])
            case unknown:
                raise ValueError(f"unknown command {unknown!r}: workers and servers run different versions of unidist")

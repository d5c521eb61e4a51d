"""Updates on a server: which optimizer moves which keys. Runs in a server process, called by the library."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import mxnet as mx

from unidist_mxnet.optimizer_state import follow, leaves
from unidist_mxnet.optimizers import from_description, set_rate
from unidist_mxnet.services import fatal


class Updates:
    def __init__(self, handle: ctypes.c_void_p) -> None:
        self._updaters: dict[int, mx.optimizer.Updater] = {}
        self._instead: dict[int, Callable[[int, mx.nd.NDArray, mx.nd.NDArray], None]] = {}  # of an update, by key
        self._kept: dict[int, mx.nd.NDArray] = {}  # parameters, while their keys show something else
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
            elif key in self._instead:
                self._instead[key](key, received, held)
            elif key in self._updaters:
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
                self._do_instead(said["keys"], self._assign)
            case "show":
                self._do_instead(said["keys"], partial(self._show, said["slot"]))
            case "hide":
                self._do_instead(said["keys"], lambda key, received, held: self._kept.pop(key, held).copyto(held))
            case "fill":
                self._do_instead(said["keys"], partial(self._fill, said["slot"]))
            case "train":
                for key in said["keys"]:
                    self._instead.pop(key, None)
            case "settle":
                for key, rate in said["rates"].items():
                    self._settle(int(key), rate)
            case "restore":
                self._restore(said)
            case "count":
                self._counters.update(said["keys"])
            case unknown:
                raise ValueError(f"unknown command {unknown!r}: workers and servers run different versions of unidist")

    # -- the state of an optimizer, which a worker reads and writes in place of its parameters -------------------

    def _do_instead(self, keys: list[int], what: Callable[[int, mx.nd.NDArray, mx.nd.NDArray], None]) -> None:
        self._instead.update(dict.fromkeys(keys, what))

    def _assign(self, key: int, received: mx.nd.NDArray, held: mx.nd.NDArray) -> None:
        received.copyto(held)
        follow(self._updaters[key], key, held)

    def _show(self, slot: int, key: int, received: mx.nd.NDArray, held: mx.nd.NDArray) -> None:
        self._kept.setdefault(key, held.copy())
        leaves(self._updaters[key].states[key])[slot].copyto(held)

    def _fill(self, slot: int, key: int, received: mx.nd.NDArray, held: mx.nd.NDArray) -> None:
        updater = self._updaters[key]
        if key not in updater.states:
            updater.states[key] = updater.optimizer.create_state_multi_precision(key, held)
            updater.states_synced[key] = True
        received.copyto(leaves(updater.states[key])[slot])

    def _settle(self, key: int, rate: float) -> None:
        """Bring a momentum to the rate that the worker takes to be inside. It is another one only where several workers
        are not in step, and each says what its own rate is."""
        updater = self._updaters[key]
        inside = updater.optimizer.rates.get(key, rate)
        if inside != rate and key in updater.states:
            state = updater.states[key]
            state *= rate / inside
            updater.optimizer.rates[key] = rate

    def _restore(self, said: dict[str, Any]) -> None:
        """Everything but the arrays, which come one after the other."""
        updater = self._updaters[said["keys"][0]]
        optimizer, counts = updater.optimizer, {int(key): count for key, count in said["counts"].items()}
        for key in said["keys"]:
            updater.states.pop(key, None)
        optimizer._index_update_count.clear()
        optimizer._index_update_count.update(counts)
        optimizer.num_update = max(counts.values(), default=0)
        if hasattr(optimizer, "rates"):
            optimizer.rates = {int(key): rate for key, rate in said["rates"].items()}
        self._furthest.pop(said["keys"][0], None)

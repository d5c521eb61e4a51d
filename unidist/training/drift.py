"""Do all ranks still hold the same parameters? They are compared now and then, since nothing else would show it."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from unidist.control.watch import WEEK
from unidist.errors import RanksDisagree, UnidistError

if TYPE_CHECKING:
    from unidist.backend import Backend
    from unidist.collectives import Collectives
    from unidist.control.peers import Peers
    from unidist.training.accumulation import Prepared

SHARE = 0.01  # of the training time that comparisons may take
SECOND = 20  # updates from the first comparison to the second, when it is not known yet what one costs
ROUNDING = 1e-5  # relative to the largest value of a parameter
SHOWN = 8  # ranks that are named one by one


class DriftCheck:
    """Compares the parameters of one model over the ranks.

    By the number of updates, which is the same on all ranks, and not by the end of a pass, which each rank sees for
    itself. How many updates make a comparison worth its cost, they compute from the same numbers.
    """

    def __init__(self, backend: Backend, collectives: Collectives) -> None:
        self._backend, self._collectives = backend, collectives
        self._updates = self._count = 0  # updates, and comparisons
        self._cost, self._began = 0.0, time.perf_counter()  # of all comparisons, and of the training
        self._pause = 2  # updates until the next comparison

    def updated(self) -> bool:
        """An update was made: is it time to compare? (The Schedule's count of updates may be that of a checkpoint.)"""
        self._updates += 1
        self._pause -= 1
        return self._pause <= 0

    def checksum(self, model: Any) -> int:
        """Of all parameters together."""
        found = 0
        for parameter in self._backend.parameters(model).values():
            found = zlib.crc32(self._backend.to_numpy(parameter).tobytes(), found)
        return found

    def outline(self, model: Any) -> dict[str, float]:
        """A sum to which each value contributes with a factor of its own, and how much rounding may change it."""
        found = rounding = 0.0
        for parameter in self._backend.parameters(model).values():
            values = self._backend.to_numpy(parameter).astype(np.float64).ravel()
            found += float(values @ np.cos(np.arange(values.size)))
            rounding += ROUNDING * max(1.0, float(np.max(np.abs(values), initial=0.0))) * values.size**0.5
        return {"sum": found, "rounding": rounding}

    def compare(self, model: Any, updates: int) -> None:
        """Raises `RanksDisagree` on every rank, naming the first parameter that differs."""
        began = time.perf_counter()
        parameters = self._backend.parameters(model)
        crcs = [zlib.crc32(self._backend.to_numpy(parameter).tobytes()) for parameter in parameters.values()]
        outline = repr([(name, tuple(parameter.shape), str(parameter.dtype)) for name, parameter in parameters.items()])
        told = {"outline": zlib.crc32(outline.encode()), "sum": zlib.crc32(repr(crcs).encode()), **self._times()}
        everyone = self._collectives.all_gather(told)
        if len({answer["outline"] for answer in everyone}) > 1:  # engines cannot take arrays of different sizes
            raise RanksDisagree(
                f"after {updates} updates, the ranks do not train the same parameters any more: names, shapes, dtypes "
                "or requires_grad differ. Make such changes on every rank alike"
            )
        if len({answer["sum"] for answer in everyone}) > 1:
            checksums = self._collectives.all_gather(np.array(crcs, dtype=np.int64))
        else:
            checksums = [crcs]
        for number, (name, tensor) in enumerate(parameters.items()):
            if any(checksum[number] != checksums[0][number] for checksum in checksums):
                self._measure(name, tensor, updates)
        self._count += 1
        # Each rank has clocks of its own, and all must come to the same number.
        cost, elapsed, update = (max(answer[name] for answer in everyone) for name in ("cost", "elapsed", "update"))
        self._pause = _pause(cost, self._count, elapsed, update)
        self._cost += time.perf_counter() - began

    def _times(self) -> dict[str, float]:
        """Of this rank up to now, without the comparison that is being made."""
        elapsed = time.perf_counter() - self._began
        return {"cost": self._cost, "elapsed": elapsed, "update": elapsed / max(1, self._updates)}

    def _measure(self, name: str, tensor: Any, updates: int) -> None:
        """Hosts with different processors may round differently, and that is no drift."""
        local = self._backend.to_numpy(tensor).astype(np.float64)
        first = self._backend.to_numpy(self._collectives.broadcast(tensor, 0)).astype(np.float64)
        apart = float(np.max(np.abs(local - first), initial=0.0))
        differences = self._collectives.all_gather(apart if np.isfinite(apart) else np.inf)
        allowed = ROUNDING * max(1.0, float(np.max(np.abs(first), initial=0.0)))
        others = [rank for rank, difference in enumerate(differences) if not difference <= allowed]
        if others:
            raise RanksDisagree(
                f"after {updates} updates, parameter {name} of rank{'s' * (len(others) > 1)} "
                f"{', '.join(map(str, others))} differs from rank 0's by {max(differences):.3g}: something other than "
                "the step has changed it, such as the framework's own optimizer, or an assignment on some ranks only. "
                "Make such changes on every rank alike, or call average_parameters(model) after them"
            )


def _pause(cost: float, count: int, elapsed: float, update: float) -> int:
    """Updates until another comparison, so that `count` of them, and the one to come, keep to their share of the time.

    `cost` is that of all but the last. One that took long, on a busy machine, makes the pauses after it longer.
    """
    if count == 1:
        return SECOND
    one = cost / (count - 1)
    affordable = (cost + 2 * one) / SHARE - elapsed
    return math.ceil(max(one / SHARE, affordable) / update)


def compare_at_the_end(models: Iterable[Prepared], peers: Peers, made: int) -> str:
    """What to say about models whose parameters differ now between the ranks, since nothing may have compared them
    since they went apart. It is no error: rank 0 may have loaded the best ones, to export them. `made` is how many
    operations this rank has taken part in, which must be the same on all.

    The ranks wait for each other here, and not inside their engine, which may take one rank's end for another's step.
    Should one of them never come, the control plane finds out.
    """
    checksums, held = {}, {}
    for prepared in models:
        model = prepared.model()
        if model is not None:  # a rank may have dropped a model that others hold
            with suppress(UnidistError):  # it has no parameters yet, or cannot get at them
                number = str(prepared.schedule.number)
                checksums[number], held[number] = prepared.drift.checksum(model), (prepared.drift, model)
    told = peers.gather("the end", {"made": made, "checksums": checksums}, WEEK)
    if len({answer["made"] for answer in told}) > 1:
        numbers = ", ".join(f"{answer['made']} on rank {rank}" for rank, answer in enumerate(told[:SHOWN]))
        raise RanksDisagree(
            "the ranks close their Strategy after different numbers of steps and other operations that all of them "
            f"take part in: {numbers}. Make the same number of steps, and call the same methods, on every rank"
        )
    everyone = [answer["checksums"] for answer in told]
    for number in checksums:
        found = [answer.get(number) for answer in everyone]
        if len(set(found)) == 1 or None in found:
            continue
        drift, model = held[number]
        outlines = peers.gather(f"the end of model {number}", drift.outline(model), WEEK)
        allowed = max(outline["rounding"] for outline in outlines)
        apart = [
            str(n) for n, outline in enumerate(outlines) if not abs(outline["sum"] - outlines[0]["sum"]) <= allowed
        ]
        if apart:
            return (
                f"at the end, the parameters of model {number} (in the order of prepare) of rank "
                f"{', '.join(apart[:SHOWN])} differ from rank 0's. Where that was not meant, something other than "
                "the step has changed them: prepare(…, check_every=1) tells what and when"
            )
    return ""

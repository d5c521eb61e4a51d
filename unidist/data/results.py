"""What users compute of batches, and which pass over which loader it belongs to."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from unidist.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

    from unidist.backend import Backend
    from unidist.collectives import Collectives
    from unidist.data.tracking import BatchInfo, Pass


class Results:
    """The passes that were made over loaders, and the results of their batches from all ranks."""

    def __init__(self, backend: Backend, collectives: Callable[[], Collectives]) -> None:
        self._backend, self._collectives, self._rank = backend, collectives, backend.world.rank
        self._passes: dict[weakref.ref[Any], Pass] = {}  # the latest of each loader, since evaluate() was entered
        self._latest: Pass | None = None  # the one that handed out a batch last
        self._handed_out = 0  # batches, by all loaders
        self._evaluating = self._entered = 0  # how many evaluate() this is in, and how often the outermost was entered

    def on_batch(self, info: BatchInfo) -> None:
        """A loader hands out a batch."""
        self._handed_out += 1
        if not info.origin.began:  # a thread may read the next training batch while the loop evaluates
            info.origin.began, info.origin.entered = self._handed_out, self._entered
            info.origin.evaluation = self._evaluating > 0 and not info.origin.for_training
        info.origin.touched = self._handed_out
        if self._latest is not info.origin:
            if not self._evaluating:  # where evaluate() forgets them all when it is entered
                self._passes = {loader: pass_ for loader, pass_ in self._passes.items() if loader() is not None}
            self._latest = self._passes[info.origin.loader] = info.origin

    def on_step(self, info: BatchInfo | None, whole: bool) -> None:
        """A step is made of a batch; of an unknown one where there is no `info`."""
        origin = self._latest if info is None else info.origin
        if origin is not None:
            origin.made += 1
            origin.evaluation = origin.evaluation and info is None
            origin.shares = origin.shares or whole
            origin.unrecognised += info is None

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        if not self._evaluating:
            self._passes = {}  # results from here on belong to the passes made here
            self._entered += 1
        self._evaluating += 1
        try:
            yield
        finally:
            self._evaluating -= 1

    def gather(self, values: Any, loader: Any) -> np.ndarray[Any, Any]:
        from unidist.data.gather import in_order, pass_of, refuse_earlier

        several = isinstance(values, (list, tuple))
        if any(isinstance(value, (dict, list, tuple)) for value in values if several):
            raise UsageError("gather takes one array or tensor for each batch: gather the parts of a result one by one")
        arrays = self._arrays(values if several else [values])
        found = pass_of(arrays, several, self._read(several) if loader is None else [loader.latest], self._rank)
        assert found.plan is not None
        if several:
            refuse_earlier(found)
        found.gathered = True
        first = 0 if several else found.steps - 1
        return in_order(arrays, found.plan, first, self._rank, self._collectives().all_gather)

    def mean(self, values: Any, loader: Any, is_loss: Callable[[Any], bool]) -> float:
        """`is_loss` tells whether a value is what a training step gave back last."""
        import numpy as np

        from unidist.data.gather import by_samples, refuse_results

        several = isinstance(values, (list, tuple))
        arrays = self._arrays(values if several else [values])
        if any(array.dtype.kind not in "biuf" for array in arrays):
            raise UsageError(f"mean takes numbers, not {[array.dtype.name for array in arrays][:3]}")
        if loader is not None:
            if not several:
                raise UsageError("mean(values, loader) takes a list with the results of all batches of the last pass")
            weights = by_samples(arrays, loader.latest, self._rank)
            loader.latest.gathered = True
        else:
            # An array of results, one for each batch, is as ambiguous as a list of them.
            results = arrays if several else list(arrays[0]) if arrays[0].size > 1 else []
            if results and not (several and is_loss(values[-1])):
                refuse_results(results, self._passes.values())
            weights = [(array, 1.0) for array in arrays]
        summed, count = self._collectives().all_reduce(
            [
                float(sum(weight * array.sum(dtype=np.float64) for array, weight in weights)),
                float(sum(weight * array.size for array, weight in weights)),
            ],
            "sum",
        )
        if not count:
            raise UsageError("mean of nothing: the list is empty on every rank")
        return float(summed / count)

    def _read(self, several: bool) -> list[Pass]:
        """The passes that results may belong to: outside of evaluate(), those of loaders that are still there. The
        result for one batch belongs to the latest pass, or to one that was read in turn with it."""
        began = 0 if several or self._latest is None else self._latest.began
        found = [pass_ for pass_ in self._passes.values() if pass_.touched >= began]
        return [pass_ for pass_ in found if self._evaluating or pass_ is self._latest or pass_.loader() is not None]

    def _arrays(self, values: Sequence[Any]) -> list[np.ndarray[Any, Any]]:
        import numpy as np

        return [
            self._backend.to_numpy(value) if self._backend.is_tensor(value) else np.asarray(value) for value in values
        ]

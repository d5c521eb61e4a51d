"""Data for all ranks, and results of all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, overload

from unidist.interface.process import Process

if TYPE_CHECKING:
    import numpy as np

    from unidist.data.batch import Scale
    from unidist.data.loader import IndexedLoader, Loader
    from unidist.data.order import Tail
    from unidist.data.tracking import BatchInfo


class Indexed(Protocol):
    """What a loader can number: arrays, tuples and dicts of them, paths, data sets."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


class Data(Process):
    @overload
    def loader(
        self,
        data: Indexed | os.PathLike[str],
        *,
        per_device_batch: int | None = ...,
        global_batch: int | None = ...,
        shuffle: bool | None = ...,
        seed: int = ...,
        tail: Tail | None = ...,
        scale: Scale | None = ...,
        prefetch: bool = ...,
        keep_float64: bool = ...,
        workers: int | None = ...,
        pin_memory: bool | None = ...,
        collate: Callable[[list[Any]], Any] | None = ...,
    ) -> IndexedLoader: ...

    @overload
    def loader(
        self,
        data: Any,
        *,
        per_device_batch: int | None = ...,
        global_batch: int | None = ...,
        shuffle: bool | None = ...,
        seed: int = ...,
        tail: Tail | None = ...,
        scale: Scale | None = ...,
        prefetch: bool = ...,
        keep_float64: bool = ...,
        workers: int | None = ...,
        pin_memory: bool | None = ...,
        collate: Callable[[list[Any]], Any] | None = ...,
    ) -> Loader: ...

    def loader(
        self,
        data: Any,
        *,
        per_device_batch: int | None = None,
        global_batch: int | None = None,
        shuffle: bool | None = None,
        seed: int = 0,
        tail: Tail | None = None,
        scale: Scale | None = None,
        prefetch: bool = True,
        keep_float64: bool = False,
        workers: int | None = None,
        pin_memory: bool | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> Loader:
        """Batches of this rank's share of `data`, on the device. `data` is one of

        - arrays, .npy paths (read as memory maps), tuples or dicts of them: gathered by index, many batches at once;
        - a data set with `len()` and `[i]`, read by the framework's own loader in `workers` processes;
        - a data loader of the framework, which keeps its batch size, collation and workers, and is given our order;
        - anything else that can be iterated: a stream, of which each rank keeps its part.

        Give one of `per_device_batch` and `global_batch`; `loader.batch` shows the arithmetic. `shuffle` reorders by
        (seed, epoch), the same on every backend and world size. `tail` says what becomes of the last, incomplete
        global batch: "keep" (shared out, weighted by sample count), "pad" (rows that weigh nothing), "drop".
        `scale="linear"` or "sqrt" makes `loader.batch.lr_scale` the factor for a rate tuned on one device, by the
        number of devices whose samples make one update: those of one worker where workers update on their own.
        """
        self._require_open()
        from unidist.data.factory import make_loader

        return make_loader(
            data,
            self._backend,
            self._on_batch,
            self._collectives.all_gather,
            self._require,
            per_device_batch=per_device_batch,
            global_batch=global_batch,
            shuffle=shuffle,
            seed=seed,
            tail=tail,
            scale=scale,
            prefetch=prefetch,
            keep_float64=keep_float64,
            workers=workers,
            pin_memory=pin_memory,
            collate=collate,
        )

    def _on_batch(self, info: BatchInfo, batch: Any) -> None:
        self._results.on_batch(info)
        self._trainer.weighing.batches.hand_out(info, batch)

    @contextmanager
    def evaluate(self, model: Any) -> Iterator[None]:
        """Inside: evaluation mode, no gradients, the bare model. Every rank enters; modes are restored after."""
        self._require_open()
        with self._watch.paused("evaluate"), ExitStack() as inside:
            together = self._watch.within("evaluate") if self._backend.evens_out(model) else nullcontext()
            with together:
                inside.enter_context(self._backend.evaluate(model))
            with self._results.evaluating():
                yield

    def gather(self, values: Any, loader: Any = None) -> np.ndarray[Any, Any]:
        """Per-sample results of every rank as one numpy array, in data-set order, each sample once.

        `values` is a list with one entry for each batch of a pass over `loader`, or the result for the batch that it
        handed out last. An entry has one row for each row of its batch; padding is dropped. The loader may be left out
        where these results fit only one of those that were read: inside `evaluate`, of those that were read there.
        """
        self._require_open()
        return self._results.gather(values, loader)

    def predict(self, model: Any, loader: Any, function: Callable[..., Any] | None = None) -> np.ndarray[Any, Any]:
        """The model's output for every sample, from all ranks, as one numpy array in data-set order.

        `function(model, batch)` says what to compute; not given, the model is called with the batch, or with its
        first part where the batch is a tuple.
        """

        def apply(batch: Any) -> Any:
            if function is not None:
                return function(model, batch)
            return model(batch[0] if isinstance(batch, (tuple, list)) else batch)

        with self.evaluate(model):
            return self.gather([apply(batch) for batch in loader], loader)

    def mean(self, values: Any, loader: Any = None) -> float:
        """The mean over all ranks of a number, an array, or a list of them such as the losses of an epoch.

        With `loader`, `values` is a list of results, one for each batch of the last pass over it, such as the losses of
        an evaluation: they count by samples, and padding is left out. Without it all numbers count equally. That is
        refused where a list is as long as a pass that was no training, and whose batches are not all of one size.
        """
        self._require_open()
        return self._results.mean(values, loader, self._trainer.gave_last)

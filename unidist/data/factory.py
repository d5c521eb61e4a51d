"""From whatever the user calls data to the loader that fits it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unidist.checks import check_whole, is_whole
from unidist.data.batch import Batch, Scale
from unidist.data.loader import IndexedLoader, Loader
from unidist.data.order import Tail
from unidist.data.source import ArraySource, DataSetSource, NativeLoader, Source, is_arrays
from unidist.data.stream import StreamLoader
from unidist.data.tracking import OnBatch
from unidist.errors import UsageError

if TYPE_CHECKING:
    from unidist.backend import Backend


def make_loader(
    data: Any,
    backend: Backend,
    on_batch: OnBatch,
    all_gather: Callable[[int], list[int]],
    require: Callable[[str], None],
    *,
    per_device_batch: int | None,
    global_batch: int | None,
    shuffle: bool | None,
    seed: int,
    tail: Tail | None,
    scale: Scale | None,
    prefetch: bool,
    keep_float64: bool,
    workers: int | None,
    pin_memory: bool | None,
    collate: Callable[[list[Any]], Any] | None,
) -> Loader:
    if not is_whole(seed, 0, 2**63 - 1):
        raise UsageError(f"seed is {seed!r}, it must be a whole number from 0 to below 2**63")
    if workers is not None:
        check_whole("workers", workers, 0)

    def batch_of(per_device: int | None) -> Batch:
        world = backend.world.world_size
        lockstep = backend.capabilities.lockstep is True
        return Batch.of(
            per_device, global_batch, devices=backend.devices, workers=world, scale=scale, lockstep=lockstep
        )

    found = backend.open_loader(data)
    if found is not None:
        require("native_loader")
        _refuse_given(
            "a data loader keeps its own settings",
            per_device_batch=per_device_batch,
            global_batch=global_batch,
            shuffle=shuffle,
            tail=tail,
            workers=workers,
            pin_memory=pin_memory,
            collate=collate,
        )
        seed = seed if found.seed is None else found.seed
        native, batch = replace(found, keep_float64=keep_float64, seed=seed), batch_of(found.batch_size)
        shuffle, tail = found.shuffle, "drop" if found.drop_last else "keep"
    elif is_arrays(data):
        _refuse_given(
            "arrays are gathered without worker processes", workers=workers or None, pin_memory=pin_memory or None,
            collate=collate,
        )  # fmt: skip
        source: Source = ArraySource(data, prefetch=prefetch, keep_float64=keep_float64, to_device=backend.from_numpy)
        return IndexedLoader(
            source,
            batch_of(per_device_batch),
            on_batch,
            rank=backend.world.rank,
            shuffle=bool(shuffle),
            seed=seed,
            tail=tail or "keep",
        )
    else:
        map_style = hasattr(data, "__len__") and hasattr(data, "__getitem__")
        if not map_style and not hasattr(data, "__iter__"):
            raise UsageError(
                f"data is of type {type(data).__name__}: the loader takes arrays, .npy paths, tuples or dicts of them, "
                "data sets (`len()` and `[i]`), data loaders of the framework, and anything that can be iterated"
            )
        require("native_loader")
        batch = batch_of(per_device_batch)
        native = NativeLoader(
            data, workers or 0, bool(pin_memory), collate, keep_float64, None, batch.per_worker, iterable=not map_style
        )
    if native.iterable:
        if shuffle:
            raise UsageError("a stream comes in its own order: shuffle it where it is made, and leave shuffle= out")
        return StreamLoader(native, batch, on_batch, backend, tail=tail or "keep", gather=all_gather)
    return IndexedLoader(
        DataSetSource(native, backend),
        batch,
        on_batch,
        rank=backend.world.rank,
        shuffle=bool(shuffle),
        seed=seed,
        tail=tail or "keep",
    )


def _refuse_given(why: str, **arguments: Any) -> None:
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        raise UsageError(f"{why}: leave out {', '.join(given)}")

"""Gluon's own DataLoader: what is inside one, and how to read with one in unidist's order. Its iterators: elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.gluon.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from mxnet.gluon.data.dataloader import default_batchify_fn

from unidist.plugin import NativeLoader, UsageError, elements_of, map_leaves
from unidist_mxnet.arrays import from_numpy
from unidist_mxnet.iterators import open_iterator, read_part


def open_loader(loader: object) -> NativeLoader | None:
    if not isinstance(loader, DataLoader):
        return open_iterator(loader)
    batches = loader._batch_sampler
    sampler = getattr(batches, "_sampler", None)
    if not isinstance(batches, BatchSampler) or not isinstance(sampler, (RandomSampler, SequentialSampler)):
        raise UsageError(
            "the DataLoader draws by a sampler of its own, whose order cannot be shared out: use batch_size= with "
            "shuffle=True or False there"
        )
    return NativeLoader(
        loader._dataset,
        workers=loader._num_workers,
        pin_memory=loader._pin_memory,
        collate=loader._batchify_fn,
        native=loader,
        batch_size=batches._batch_size,
        shuffle=isinstance(sampler, RandomSampler),
        drop_last=batches._last_batch == "discard",
    )


@contextmanager
def read_batches(source: NativeLoader, batches: Sequence[Sequence[int]] | None, context: mx.Context) -> Iterator[Any]:
    if source.parted:
        yield read_part(source, context)
        return
    collate = source.collate or default_batchify_fn
    if collate is mx.gluon.data.dataloader.default_mp_batchify_fn:  # made for processes; here threads read
        collate = default_batchify_fn
    if batches is None:
        reading = _stream(source, collate)
    else:
        # Threads, not processes: a fork of a process that holds a KVStore hangs.
        reading = iter(
            DataLoader(
                source.dataset,
                batch_sampler=list(batches),
                batchify_fn=collate,
                num_workers=source.workers,
                thread_pool=True,
            )
        )
    ready = partial(_ready, context, source.keep_float64)
    yield (map_leaves(ready, batch, lists=tuple) for batch in reading)


def _stream(source: NativeLoader, collate: Any) -> Iterator[Any]:
    assert source.stream is not None
    skip, batch, share, _ = source.stream
    waiting = []
    for element in elements_of(source.dataset, skip=skip, batch=batch, share=share, worker=0, workers=1):
        waiting.append(element)
        if len(waiting) == len(share):
            yield len(waiting), collate(waiting)
            waiting = []
    if waiting:
        yield len(waiting), collate(waiting)


def _ready(context: mx.Context, keep_float64: bool, leaf: Any) -> Any:
    """On the device, with the same dtypes as arrays arrive: float64 as float32, labels int64."""
    if not isinstance(leaf, (mx.nd.NDArray, np.ndarray)):
        return leaf
    if leaf.dtype == np.float64 and not keep_float64:
        leaf = leaf.astype(np.float32)
    elif leaf.ndim == 1 and np.dtype(leaf.dtype).kind in "iu":
        leaf = leaf.astype(np.int64)
    return from_numpy(leaf, context) if isinstance(leaf, np.ndarray) else leaf.as_in_context(context)

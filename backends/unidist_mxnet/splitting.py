"""How a batch is split over the devices of a worker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import mxnet as mx
from mxnet import nd

from unidist.plugin import UsageError, arrays_of, map_leaves


def split(batch: Sequence[Any], contexts: Sequence[mx.Context]) -> Iterator[tuple[float, Sequence[Any]]]:
    """For each device that gets any rows: its share of them, and its part of the batch."""
    rows = next((len(array) for array in arrays_of(batch) if isinstance(array, nd.NDArray)), None)
    if rows is None:
        raise UsageError("the batch holds no array that could be split over the devices")
    base, larger = divmod(rows, len(contexts))
    begin = 0
    for n, context in enumerate(contexts):
        end = begin + base + (n < larger)
        if end > begin:
            yield (end - begin) / rows, map_leaves(partial(_part, rows, begin, end, context), batch)
        begin = end


def _part(rows: int, begin: int, end: int, context: mx.Context, leaf: Any) -> Any:
    if not isinstance(leaf, nd.NDArray):
        return leaf
    rowwise = leaf.shape and leaf.shape[0] == rows
    return (leaf[begin:end] if rowwise else leaf).as_in_context(context)

"""From what every rank computed for its rows back to one array in data-set order, each sample once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from unidist.data.order import Epoch
from unidist.errors import UsageError

Array = np.ndarray[Any, Any]


def in_order(
    values: list[Array], epoch: Epoch, first: int, rank: int, all_gather: Callable[[Array], list[Array]]
) -> Array:
    """`values` holds one array for each step of `epoch` from `first` on, one row for each row of the batch."""
    stop, workers = first + len(values), epoch.batch.workers
    for step, value in enumerate(values, first):
        rows = epoch.counts(rank, step).rows
        if value.ndim == 0 or len(value) != rows:
            raise UsageError(
                f"gather: batch {step} had {rows} rows on rank {rank}, the result for it has shape {value.shape}. "
                "gather wants one row for each sample; for other values use all_gather or mean."
            )
    mine = np.concatenate(values)
    indices = [epoch.indices(each, first, stop) for each in range(workers)]
    longest = max(map(len, indices))
    padded = np.zeros((longest, *mine.shape[1:]), mine.dtype)
    padded[: len(mine)] = mine
    gathered = [rows[: len(own)] for rows, own in zip(all_gather(padded), indices, strict=True)]
    real = np.concatenate([epoch.real(each, first, stop) for each in range(workers)])
    samples = np.concatenate(indices)[real]
    ordered: Array = np.concatenate(gathered)[real][np.argsort(samples, kind="stable")]
    return ordered

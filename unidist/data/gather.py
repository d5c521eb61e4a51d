"""From what every rank computed for its rows back to one array in data-set order, each sample once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from unidist.data.order import Epoch
from unidist.data.tracking import Pass
from unidist.errors import StateError, UnsupportedOperation, UsageError

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
    indices = [epoch.indices(number, first, stop) for number in range(workers)]
    longest = max(map(len, indices))
    padded = np.zeros((longest, *mine.shape[1:]), mine.dtype)
    padded[: len(mine)] = mine
    gathered = [rows[: len(theirs)] for rows, theirs in zip(all_gather(padded), indices, strict=True)]
    real = np.concatenate([epoch.real(number, first, stop) for number in range(workers)])
    samples = np.concatenate(indices)[real]
    ordered: Array = np.concatenate(gathered)[real][np.argsort(samples, kind="stable")]
    return ordered


def pass_of(values: list[Array], several: bool, passes: Iterable[Pass | None], rank: int) -> Pass:
    """The pass that these results, one for each of its batches, or one for the latest, belong to."""
    made = [pass_ for pass_ in passes if pass_ is not None and pass_.steps]
    made = [pass_ for pass_ in made if not pass_.trained] or made
    if not made:
        raise StateError(
            "gather() belongs to a pass over a loader, and there was none: for other values use all_gather"
        )
    ordered = [pass_ for pass_ in made if pass_.plan is not None]
    if not ordered:
        raise UnsupportedOperation("gather() needs an order of samples, and a stream has none: use all_gather")
    if not several and any(len(pass_.held()) > 1 for pass_ in ordered):
        raise UsageError(
            "gather: several batches of this pass are held, so the one that this result belongs to cannot be seen: "
            "gather the list of the results of all batches"
        )
    if len(ordered) == 1:
        if several and len(values) != ordered[0].steps:
            raise UsageError(
                f"gather: the loader's last pass handed out {ordered[0].steps} batches, here are {len(values)} results"
            )
        return ordered[0]
    fitting = [pass_ for pass_ in ordered if _fits(values, several, pass_, rank)]
    if len({pass_.plan.key for pass_ in fitting if pass_.plan}) != 1:
        raise UsageError(
            f"{len(ordered)} loaders were read, and these results fit {'several' if fitting else 'none'} of them: say "
            "whose they are, gather(values, loader)"
        )
    return fitting[-1]


def refuse_earlier(found: Pass) -> None:
    """These results are put into the order of this pass, and may be of one before it, which had another."""
    before = found.before
    if before is None or before.trained or before.plan is None or before.entered != found.entered:
        return
    assert found.plan is not None
    if before.steps == found.steps and before.plan.key != found.plan.key:
        raise UsageError(
            "gather: two passes were made over this loader, each in an order of its own, so the one that these results "
            "belong to cannot be seen: gather after each pass, or make the loader with shuffle=False"
        )


def _rows(made: Pass, step: int, rank: int) -> tuple[int, int]:
    """(samples, rows) of one batch of a pass."""
    if made.plan is not None:
        real, rows, _ = made.plan.counts(rank, step)
        return real, rows
    assert made.counts is not None
    return made.counts[step]


def _fits(values: list[Array], several: bool, made: Pass, rank: int) -> bool:
    first = 0 if several else made.steps - 1
    return len(values) == made.steps - first and all(
        value.ndim > 0 and len(value) == _rows(made, first + n, rank)[1] for n, value in enumerate(values)
    )


def by_samples(values: list[Array], made: Pass | None, rank: int) -> list[tuple[Array, float]]:
    """Results of the batches of a pass, each with its weight."""
    steps = 0 if made is None else made.steps
    if made is None or len(values) != steps:
        raise UsageError(f"mean: the loader's last pass handed out {steps} batches, here are {len(values)} results")
    if made.shares and not made.alike:
        raise UsageError(
            "mean: the losses of a training step count by samples already: leave the loader out, mean(losses). Other "
            "results of a training pass can be gathered, gather(values, loader).mean()"
        )
    alike = made.alike
    return [_share(value, *_rows(made, n, rank), alike) for n, value in enumerate(values)]


def refuse_results(values: list[Array], passes: Iterable[Pass]) -> None:
    """These are to count equally, and nobody can see whether they are results of batches that hold unequally much."""
    for pass_ in passes:
        if pass_.steps == len(values) and not pass_.shares and not pass_.alike:
            raise UsageError(
                f"mean: here are {len(values)} numbers, and a loader has handed out as many batches, not all of the "
                "same size. If these are results for them, say so, mean(values, loader), and they count by samples. If "
                "not, take their mean first: mean(sum(values) / len(values))"
            )


def _share(value: Array, real: int, rows: int, alike: bool) -> tuple[Array, float]:
    """A row for each sample: those of padding go. One number for the whole batch: it stands for its samples. Several
    for each sample, one after the other: they count equally, where none is of padding."""
    if value.size == 1:
        return value, float(real)
    if len(value) != rows and (real != rows or (len(value) % rows and not alike)):
        raise UsageError(
            f"mean: the result for a batch of {rows} rows, {rows - real} of them padding, has shape {value.shape}, so "
            "which numbers belong to which sample cannot be seen: give one row for each row of the batch, as by "
            "reshape(rows, -1), or one number"
        )
    return value[: real if len(value) == rows else None], 1.0

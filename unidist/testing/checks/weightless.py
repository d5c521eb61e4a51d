"""Batches, or parts of them, that weigh nothing: rows of padding, and losses that are the mean of no samples."""

from __future__ import annotations

import itertools
import math

import numpy as np

from unidist.errors import UsageError
from unidist.optim import SGD
from unidist.testing import reference
from unidist.testing.case import Case, check, close, refused
from unidist.testing.recorded import Recorded, loader_of, real_rows


@check
def rank_without_samples_reads_ahead(case: Case) -> None:
    """Its row of padding weighs nothing, wherever it comes, and also where a batch is one row."""
    for per_device in (4, 1):
        whole = per_device * case.backend.devices * case.size
        loader = case.strategy.loader(reference.data(whole * 2 + 1), per_device_batch=per_device)
        train, reals = Recorded(case), real_rows(case, loader)
        pairs = list(zip(loader, reals, strict=True))
        for (x, y), real in [*pairs, *pairs[::-1], *pairs[1:]]:
            train(x, y, real=real)
        train.is_serial()


@check
def loss_that_is_no_number_and_weighs_nothing(case: Case) -> None:
    """As the mean over no token: 0 times that is not a number either. The rank adds nothing, to gradients or means."""
    case.needs_ranks(2)
    whole = 4 * case.backend.devices * case.size
    told = [None] if case.backend.devices > 1 else [None, "some", "all"]  # which ranks' last batches are said to be 0
    for accumulate, weightless in itertools.product((1, 2), told):
        factor = 1.0
        train = Recorded(
            case,
            accumulate,
            loss_fn=lambda m, x, y: case.zoo.cross_entropy(m, x, y) * factor,  # noqa: B023
        )
        losses = []
        samples = whole * (3 if accumulate == 2 else 2) + (1 if weightless is None else whole)
        loader = case.strategy.loader(reference.data(samples), per_device_batch=4)
        for n, ((x, y), real) in enumerate(zip(loader, real_rows(case, loader), strict=True)):
            nothing = n == len(loader) - 1 and (weightless == "all" or case.rank > 0)
            factor = math.nan if nothing else 1.0
            how = {"weight": 0 if nothing else real} if weightless else {}
            losses.append(train(x, y, real=0 if nothing else real, **how))
        assert np.isfinite(case.strategy.mean(losses))
        assert case.backend.to_numpy(losses[-1]).item() == 0 or not nothing
        train.is_serial()


def change_padding(case: Case, tail: str) -> None:
    train = Recorded(case)
    batches = list(loader_of(case, batches=1, rest=int(tail == "pad"), tail=tail))
    train(*batches[0])
    x, y = batches[1]
    if tail == "pad" or case.rank > 0:  # the one sample that is left is rank 0's
        with refused(UsageError, "weight"):
            train(x * 1.0, y * 1)


@check
def padding_that_cannot_be_recognised_is_refused(case: Case) -> None:
    change_padding(case, "pad")
    if case.size > 1:
        change_padding(case, "keep")  # a rank without samples


@check
def loss_that_is_no_number_passes_through_no_statistics(case: Case) -> None:
    """Batch normalisation over all ranks: their gradients are summed up in the middle of backward."""
    case.requires("sync_batchnorm")
    case.needs_ranks(2)
    results = []
    for number in (1.0, math.nan):
        model, optimizer = case.strategy.prepare(case.zoo.with_buffers(), SGD(0.5), sync_batchnorm=True)
        arrays = {
            name: np.full_like(case.backend.to_numpy(tensor), 0.5) for name, tensor in case.backend.state(model).items()
        }
        case.backend.load_state(model, arrays)
        factor = 1.0
        step = case.strategy.train_step(
            model,
            optimizer,
            lambda m, x, y: case.zoo.cross_entropy(m, x, y) * factor,  # noqa: B023
        )
        loader = case.strategy.loader(reference.data(8 * case.size + 1), per_device_batch=4)
        for (x, y), real in zip(loader, real_rows(case, loader), strict=True):
            factor = 1.0 if real else number
            step(x, y)
        results.append(case.parameters(model))
    close(results[1], results[0])

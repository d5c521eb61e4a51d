"""What test_oneflow.py runs on ranks: importable where pytest is not installed, and before oneflow is."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import time
from pathlib import Path
from typing import Any

from oneflow_graphs_on_ranks import (
    batches_tracked,
    dropout_resumed,
    layers_that_change_their_mode,
    model_that_cannot_be_traced,
    what_users_see,
)
from oneflow_rank_support import flat_state, mlp, own_batch, train
from oneflow_refusals_on_ranks import (
    changed_deep_inside,
    dtypes,
    frozen_late,
    gradients_changed_in_a_group,
    gradients_taken_away,
    nothing_to_train,
)
from oneflow_updates_on_ranks import OPTIMIZERS, odd_batches, optimized, two_models, two_steps_that_share_a_group

import unidist


def in_mirrored_view(folder: str) -> dict[str, Any]:
    # Started in the background of a shell, a process ignores SIGINT from the beginning, and so do its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with unidist.Strategy() as strategy:
        return {
            "curve": curve(strategy),
            **in_any_view(strategy, folder),
            "interrupted": interrupted(),
            "data loaders": data_loaders_taken_over(strategy),
            "dropout": dropout_resumed(strategy, folder),
        }


def in_consistent_view(folder: str) -> dict[str, Any]:
    with unidist.Strategy() as strategy:
        return {
            "curve": curve(strategy),
            **in_any_view(strategy, folder),
            "untraceable": model_that_cannot_be_traced(strategy),
            "seen": what_users_see(strategy),
            "batches tracked": batches_tracked(strategy),
            "modes": layers_that_change_their_mode(strategy),
            "dropout": dropout_resumed(strategy, folder),
        }


def in_any_view(strategy: unidist.Strategy, folder: str) -> dict[str, Any]:
    return {
        "dtypes": dtypes(strategy),
        "gradients taken away": gradients_taken_away(strategy),
        "gradients changed": gradients_changed_in_a_group(strategy),
        "memory": memory_of_steps_that_nobody_waits_for(strategy),
        "frozen late": frozen_late(strategy),
        "changed deep inside": changed_deep_inside(strategy),
        "nothing to train": nothing_to_train(strategy),
        "two steps": two_steps_that_share_a_group(strategy),
        "two models": two_models(strategy),
        "odd batches": odd_batches(strategy),
        "optimizers": {kind: optimized(strategy, kind, f"{folder}-{kind}") for kind in OPTIMIZERS},
    }


def without_graph() -> dict[str, Any]:
    with unidist.Strategy() as strategy:
        return {"curve": curve(strategy), "batches tracked": batches_tracked(strategy)}


def batches_that_come_to_differ(where: str) -> list[float]:
    """Hand-made batches that lose a row: on "one" rank, on "all", or on "all, then one"."""
    with unidist.Strategy() as strategy, contextlib.redirect_stderr(io.StringIO()):
        from unidist_oneflow import agreement, zoo

        agreement.PATIENCE = 3.0
        model, optimizer = strategy.prepare(mlp(strategy), unidist.SGD(0.1))
        step = strategy.train_step(model, optimizer, zoo.cross_entropy)
        for number in range(6):
            on_all, on_one = number == 2 and where != "one", number == 3 and where != "all" and strategy.rank == 1
            step(*(each[: 4 - (on_all or on_one)] for each in own_batch(strategy, number % 4)))
        return flat_state(strategy, model)


def curve(strategy: unidist.Strategy) -> list[float]:
    from unidist_oneflow import zoo

    return train(strategy, mlp(strategy), zoo.cross_entropy)


def memory_of_steps_that_nobody_waits_for(strategy: unidist.Strategy) -> tuple[int, int]:
    """Pages after 400 and after 6,400 steps."""
    from unidist_oneflow import zoo

    model, optimizer = strategy.prepare(mlp(strategy), unidist.SGD(0.1))
    step = strategy.train_step(model, optimizer, zoo.cross_entropy)
    batch, held = own_batch(strategy, 0), []
    for steps in (400, 6000):
        for _ in range(steps):
            step(*batch)
        held.append(int(Path("/proc/self/statm").read_text().split()[1]))
    return held[0], held[1]


def interrupted() -> bool:
    """Whether Ctrl-C is a KeyboardInterrupt, as in any Python program."""
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    except KeyboardInterrupt:
        return True
    return False


def data_loaders_taken_over(strategy: unidist.Strategy) -> list[Any]:
    """What strategy.loader makes of DataLoaders with various samplers: the samples seen by all, or the error."""
    import oneflow as flow
    from oneflow.utils.data import DataLoader, DistributedSampler, SubsetRandomSampler, TensorDataset

    data = TensorDataset(flow.arange(10))
    own = DistributedSampler(data, shuffle=True, seed=4)
    wrong = DistributedSampler(data, num_replicas=2, rank=1 - strategy.rank)
    results: list[Any] = []
    for sampler in (own, wrong, SubsetRandomSampler(range(5))):
        try:
            loader = strategy.loader(DataLoader(data, batch_size=2, sampler=sampler, num_workers=1))
            results.append(strategy.gather([x for (x,) in loader]).tolist())
        except unidist.UnidistError as error:
            results.append(str(error))
    return results

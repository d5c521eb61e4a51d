"""What the functions that run on OneFlow's ranks share. They are importable before oneflow is, and without pytest."""

from __future__ import annotations

from typing import Any

import numpy as np

import unidist
from unidist.testing import reference


def train(strategy: unidist.Strategy, model: Any, loss_fn: Any, samples: int = 22) -> list[float]:
    """Two passes with an uneven end."""
    model, optimizer = strategy.prepare(model, unidist.SGD(0.3, momentum=0.9))
    step = strategy.train_step(model, optimizer, loss_fn)
    loader = strategy.loader(reference.data(samples), per_device_batch=4)
    return [strategy.mean(step(x, y)) for _ in range(2) for x, y in loader]


def mlp(strategy: unidist.Strategy) -> Any:
    from unidist_oneflow import zoo

    model, backend = zoo.mlp(), strategy._backend
    backend.load_state(model, dict(zip(backend.state(model), reference.weights(), strict=True)))
    return model


def own_batch(strategy: unidist.Strategy, number: int) -> list[Any]:
    """Four samples of this rank's own."""
    begin = 4 * (number * strategy.world_size + strategy.rank)
    return [strategy._backend.from_numpy(each[begin : begin + 4]) for each in reference.data(32)]


def flat_state(strategy: unidist.Strategy, model: Any) -> list[float]:
    backend = strategy._backend
    return np.concatenate([backend.to_numpy(each).ravel() for each in backend.state(model).values()]).tolist()


def refusal(action: Any) -> str:
    try:
        action()
    except unidist.errors.UnidistError as error:
        return str(error)
    return "not refused"

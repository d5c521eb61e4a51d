"""Updates in either of OneFlow's views, on ranks: several steps, models, optimizers, and batches of odd shapes."""

from __future__ import annotations

import contextlib
import io
import warnings
from typing import Any, NamedTuple

import numpy as np
from oneflow_rank_support import flat_state, mlp, own_batch

import unidist
from unidist.testing import reference


def two_steps_that_share_a_group(strategy: unidist.Strategy) -> list[float]:
    """The parameters after an update for which each of two training steps gave one batch."""
    from unidist_oneflow import zoo

    model, optimizer = strategy.prepare(mlp(strategy), unidist.SGD(0.3), accumulate=2)
    one = strategy.train_step(model, optimizer, zoo.cross_entropy)
    other = strategy.train_step(model, optimizer, lambda *given: 2 * zoo.cross_entropy(*given))
    one(*own_batch(strategy, 0))
    other(*own_batch(strategy, 1))
    return flat_state(strategy, model)


def two_models(strategy: unidist.Strategy) -> list[float]:
    """The parameters of two models, each of which is trained through the other one, with an uneven end."""
    import oneflow as flow
    from oneflow import nn

    from unidist_oneflow import zoo

    flow.manual_seed(5)
    parts = [strategy.prepare(each, unidist.SGD(0.1)) for each in (nn.Linear(6, 400), nn.Linear(400, 4))]
    (first, _), (last, _) = parts

    def loss_fn(model: Any, x: Any, y: Any) -> Any:
        return zoo.cross_entropy(nn.Sequential(first, last), x, y)

    steps = [strategy.train_step(*part, loss_fn) for part in parts]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x, y in strategy.loader(reference.data(8 * strategy.world_size * 4 + 3), per_device_batch=4):
            for step in steps:
                step(x, y)
    return flat_state(strategy, first)[:600] + flat_state(strategy, last)


OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("SGD", {}),
    "nesterov": ("SGD", {"momentum": 0.9, "nesterov": True}),
    "adam": ("Adam", {}),
    "adamw": ("AdamW", {"betas": (0.8, 0.9)}),
    "amsgrad": ("Adam", {"amsgrad": True}),
    "amsgrad, later": ("Adam", {}),
    "rmsprop": ("RMSprop", {}),
}


class Optimized(NamedTuple):
    before: list[float]  # parameters
    after: list[float]  # a few updates, with settings that change
    resumed: list[float]  # the same updates again, from a checkpoint
    traced: int  # calls of the loss function, at first one for each of two updates
    gradients_seen: bool  # outside of the graph


def optimized(strategy: unidist.Strategy, kind: str, folder: str) -> Optimized:
    """One layer has nothing to do with the loss, and the groups have rates of their own."""
    import oneflow as flow
    from oneflow import nn

    from unidist_oneflow import zoo

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = mlp(strategy), nn.Linear(2, 2)

        def forward(self, x: Any) -> Any:
            return self.used(x)

    flow.manual_seed(7)
    net = Net()
    name, settings = OPTIMIZERS[kind]
    groups = [{"params": net.used.parameters(), "lr": 0.1}, {"params": net.unused.parameters()}]
    own = getattr(flow.optim, name)(groups, lr=0.2, weight_decay=0.01, **settings)
    model, optimizer = strategy.prepare(net, own)
    calls = []

    def loss_fn(*arguments: Any) -> Any:
        calls.append(arguments)
        return zoo.cross_entropy(*arguments)

    step = strategy.train_step(model, optimizer, loss_fn)
    states = [flat_state(strategy, model)]
    for number in range(2):
        step(*own_batch(strategy, number))
    traced, buffers = len(calls), strategy._backend._prepared[model].gradients.buffers
    seen = any(buffer.numpy().any() for buffer in buffers)
    strategy.save(folder, model=model, optimizer=optimizer)
    for _ in range(2):
        for number in range(4):
            used, unused = optimizer.param_groups
            used["lr"] = (1, 0.1, np.float32(0.2), np.float64(0.3))[number]
            unused["weight_decay"] = 0.01 if number < 2 else 0.1
            if kind == "amsgrad, later":
                used["amsgrad"] = unused["amsgrad"] = number > 1
            step(*own_batch(strategy, number))
        states.append(flat_state(strategy, model))
        strategy.load(folder, model=model, optimizer=optimizer)
    return Optimized(*states, traced, seen)


def odd_batches(strategy: unidist.Strategy) -> dict[str, list[float]]:
    """The parameters after training on batches that a global tensor cannot be made of at once."""
    import oneflow as flow

    from unidist_oneflow import zoo

    class Pair(NamedTuple):
        x: Any
        y: Any

    results = {}
    loss = zoo.cross_entropy
    x, y = own_batch(strategy, 0)
    rows = 3 + strategy.rank
    for name, batch, loss_fn in (
        ("a tensor without axes", (x, y, flow.tensor(0.5 + strategy.rank)), lambda m, x, y, k: k * loss(m, x, y)),
        ("rows that differ", (x[:rows], y[:rows]), loss),
        ("a named tuple", (Pair(x, y),), lambda m, pair: loss(m, pair.x, pair.y)),
    ):
        with contextlib.redirect_stderr(io.StringIO()):  # runs eagerly
            model, optimizer = strategy.prepare(mlp(strategy), unidist.SGD(0.3))
            step = strategy.train_step(model, optimizer, loss_fn)
            step(*batch)
            step(*batch)
        results[name] = flat_state(strategy, model)
    return results

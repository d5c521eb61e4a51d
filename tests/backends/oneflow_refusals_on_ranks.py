"""What OneFlow would abort on or train wrongly, on ranks: dtypes, and gradients and parameters that were changed."""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from oneflow_rank_support import mlp, own_batch, refusal

import unidist
from unidist.testing import reference


def dtypes(strategy: unidist.Strategy) -> dict[str, Any]:
    """float16 and bfloat16 would abort the process inside OneFlow's own all_reduce and broadcast."""
    import oneflow as flow

    from unidist_oneflow import zoo

    results: dict[str, Any] = {}
    for dtype in (flow.float16, flow.bfloat16, flow.int8, flow.bool):
        own = flow.ones(3).to(dtype)
        for op in ("sum", "min", "max"):
            results[f"{dtype} {op}"] = strategy.all_reduce(own, op).to(flow.float32).numpy().tolist()
        results[f"{dtype} broadcast"] = strategy.broadcast(own).to(flow.float32).numpy().tolist()
    results["int16"] = refusal(lambda: strategy._backend.from_numpy(np.zeros(2, np.int16)))
    results["float16 model"] = refusal(lambda: strategy.prepare(zoo.mlp().to(flow.float16), unidist.SGD(0.1)))
    frozen = zoo.mlp().to(flow.float16).requires_grad_(False)
    results["frozen float16"] = refusal(
        lambda: strategy.prepare(flow.nn.Sequential(frozen, flow.nn.Linear(4, 4)), unidist.SGD(0.1))
    )
    model, optimizer = strategy.prepare(mlp(strategy).to(flow.float64), unidist.SGD(0.3))
    step = strategy.train_step(model, optimizer, zoo.cross_entropy)
    x, y = reference.data(4 * strategy.world_size)
    loader = strategy.loader((x.astype(np.float64), y), per_device_batch=4, keep_float64=True)
    step(*next(iter(loader)))
    serial = reference.Serial(reference.weights(), unidist.SGD(0.3))
    serial.step(x, y)
    state = [strategy._backend.to_numpy(each) for each in strategy._backend.state(model).values()]
    results["float64 error"] = max(abs(a - b).max() for a, b in zip(state, serial.parameters, strict=True))
    return results


def gradients_taken_away(strategy: unidist.Strategy) -> list[str]:
    """All of them, or only the last."""
    from unidist_oneflow import zoo

    def take_all(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=True)

    def take_last(model: Any, optimizer: Any) -> None:
        list(strategy._backend._prepared[model].named.values())[-1].grad = None

    said = []
    for take in (take_all, take_last):
        model, optimizer = strategy.prepare(mlp(strategy), unidist.SGD(0.1))
        step = strategy.train_step(model, optimizer, zoo.cross_entropy)
        take(model, optimizer)
        said.append(refusal(lambda step=step: step(*own_batch(strategy, 0))))
    return said


def gradients_changed_in_a_group(strategy: unidist.Strategy) -> dict[str, str]:
    """Most of them are zero, as those of an embedding of which a batch uses little."""
    import oneflow as flow

    embedding = flow.nn.Embedding(5000, 3)
    with contextlib.redirect_stderr(io.StringIO()):  # the ranks begin differently
        model, optimizer = strategy.prepare(embedding, unidist.SGD(0.1), accumulate=3)
    step = strategy.train_step(model, optimizer, lambda m, rows: m(rows).sum())
    rows = flow.tensor([17, 4001])
    (parameter,) = strategy._backend._prepared[model].named.values()

    def group(change: Callable[[], Any]) -> None:
        for number in range(3):
            step(rows)
            if number == 0:
                change()

    def clear_and_flush() -> None:
        step(rows)
        step(rows)
        optimizer.zero_grad()
        strategy.flush(model, optimizer)

    ways: dict[str, Callable[[], Any]] = {
        "zero_grad": optimizer.zero_grad,
        "zero_": lambda: parameter.grad.zero_(),
        "detached": lambda: parameter.grad.detach().mul_(0.5),
        "nothing": lambda: None,
        "looking": lambda: parameter.grad.numpy(),
    }
    if strategy._backend.options.view == "mirrored":  # in the other one the model's tensors have none
        ways["model.zero_grad"] = model.zero_grad
    said = {how: refusal(lambda change=change: group(change)) for how, change in ways.items()}
    held = parameter.grad
    return {**said, "held": refusal(lambda: group(held.zero_)), "flush": refusal(clear_and_flush)}


def frozen_late(strategy: unidist.Strategy) -> list[str]:
    """After prepare: a parameter is frozen, and one is unfrozen."""
    import oneflow as flow

    from unidist_oneflow import zoo

    said = []
    for frozen in (True, False):
        model = mlp(strategy)
        next(model.parameters()).requires_grad_(frozen)
        model, optimizer = strategy.prepare(model, flow.optim.SGD(model.parameters(), lr=0.1))
        step = strategy.train_step(model, optimizer, zoo.cross_entropy)
        step(*own_batch(strategy, 0))
        next(model.parameters()).requires_grad_(not frozen)
        said.append(refusal(lambda step=step: step(*own_batch(strategy, 0))))
    return said


def changed_deep_inside(strategy: unidist.Strategy) -> list[str]:
    """One of many layers is unfrozen, or frozen: the next step is refused."""
    from oneflow import nn

    from unidist_oneflow import zoo

    said = []
    for trained, by_assignment in itertools.product((False, True), repeat=2):
        deep = nn.Sequential(*(nn.Linear(6, 6) for _ in range(30)))
        deep[17].requires_grad_(trained)
        with contextlib.redirect_stderr(io.StringIO()):  # the ranks begin differently
            model, optimizer = strategy.prepare(deep, unidist.SGD(0.1))
        step = strategy.train_step(model, optimizer, zoo.cross_entropy)
        step(*own_batch(strategy, 0))
        if by_assignment:
            model[17].bias.requires_grad = not trained
        else:
            model[17].requires_grad_(not trained)
        said.append(refusal(lambda step=step: step(*own_batch(strategy, 0))))
    return said


def nothing_to_train(strategy: unidist.Strategy) -> str:
    import oneflow as flow

    model = mlp(strategy).requires_grad_(False)
    return refusal(lambda: strategy.prepare(model, flow.optim.SGD(model.parameters(), lr=0.1)))

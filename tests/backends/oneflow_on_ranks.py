"""What test_oneflow.py runs on ranks: importable where pytest is not installed, and before oneflow is."""

from __future__ import annotations

import contextlib
import io
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


def mlp(backend: Any, zoo: Any) -> Any:
    model = zoo.mlp()
    backend.load_state(model, dict(zip(backend.state(model), reference.weights(), strict=True)))
    return model


def curve() -> list[float]:
    with unidist.Strategy() as strategy:
        from unidist_oneflow import zoo

        return train(strategy, mlp(strategy._backend, zoo), zoo.cross_entropy)


def model_that_cannot_be_traced() -> tuple[list[float], str]:
    """The losses, and what was said."""
    with unidist.Strategy() as strategy, contextlib.redirect_stderr(io.StringIO()) as heard:
        from unidist_oneflow import zoo

        def loss_fn(model: Any, x: Any, y: Any) -> Any:
            loss = zoo.cross_entropy(model, x, y)
            float(loss.detach().numpy()) if x.is_local else loss.item()  # a graph has no values yet
            return loss

        return train(strategy, mlp(strategy._backend, zoo), loss_fn), heard.getvalue()


def what_users_see_in_the_consistent_view() -> dict[str, Any]:
    with unidist.Strategy() as strategy:
        import oneflow as flow

        from unidist_oneflow import zoo

        model, optimizer = strategy.prepare(zoo.mlp(), unidist.SGD(0.1))
        step = strategy.train_step(model, optimizer, zoo.cross_entropy)
        x, y = (strategy._backend.from_numpy(each) for each in reference.data(4))
        loss = step(x, y)
        twice = zoo.mlp()
        twice.to_global(placement=flow.placement.all("cpu"), sbp=flow.sbp.broadcast)
        return {
            "the model is global": all(parameter.is_global for parameter in model.parameters()),
            "the loss is local": loss.is_local,
            "a reduced loss is local": strategy.all_reduce(loss).is_local,
            "global before": refusal(lambda: strategy.prepare(twice, unidist.SGD(0.1))),
            "prepared twice": refusal(lambda: strategy.prepare(model, unidist.SGD(0.1))),
        }


def dtypes() -> dict[str, Any]:
    """float16 and bfloat16 would abort the process inside OneFlow's own all_reduce and broadcast."""
    with unidist.Strategy() as strategy:
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
        double = mlp(strategy._backend, zoo).to(flow.float64)
        model, optimizer = strategy.prepare(double, unidist.SGD(0.3))
        step = strategy.train_step(model, optimizer, zoo.cross_entropy)
        x, y = reference.data(4 * strategy.world_size)
        loader = strategy.loader((x.astype(np.float64), y), per_device_batch=4, keep_float64=True)
        step(*next(iter(loader)))
        serial = reference.Serial(reference.weights(), unidist.SGD(0.3))
        serial.step(x, y)
        state = [strategy._backend.to_numpy(each) for each in strategy._backend.state(model).values()]
        results["float64 error"] = max(abs(a - b).max() for a, b in zip(state, serial.parameters, strict=True))
        return results


def gradients_taken_away() -> str:
    with unidist.Strategy() as strategy:
        from unidist_oneflow import zoo

        model, optimizer = strategy.prepare(zoo.mlp(), unidist.SGD(0.1))
        step = strategy.train_step(model, optimizer, zoo.cross_entropy)
        optimizer.zero_grad(set_to_none=True)
        x, y = (strategy._backend.from_numpy(each) for each in reference.data(4))
        return refusal(lambda: step(x, y))


def refusal(action: Any) -> str:
    try:
        action()
    except unidist.errors.UnidistError as error:
        return str(error)
    return "not refused"

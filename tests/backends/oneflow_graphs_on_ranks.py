"""Models in OneFlow's consistent view, on ranks: what is traced, what users see of it, and what is counted."""

from __future__ import annotations

import contextlib
import io
from typing import Any

from oneflow_rank_support import mlp, refusal, train

import unidist
from unidist.testing import reference


def model_that_cannot_be_traced(strategy: unidist.Strategy) -> tuple[list[float], str]:
    """The losses, and what was said."""
    from unidist_oneflow import zoo

    def loss_fn(model: Any, x: Any, y: Any) -> Any:
        loss = zoo.cross_entropy(model, x, y)
        float(loss.detach().numpy()) if x.is_local else loss.item()  # a graph has no values yet
        return loss

    with contextlib.redirect_stderr(io.StringIO()) as heard, contextlib.redirect_stdout(heard):
        return train(strategy, mlp(strategy), loss_fn), heard.getvalue()


def what_users_see(strategy: unidist.Strategy) -> dict[str, Any]:
    import oneflow as flow

    from unidist_oneflow import zoo

    model, optimizer = strategy.prepare(mlp(strategy), unidist.SGD(0.1))
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


def batches_tracked(strategy: unidist.Strategy) -> int:
    """The count of batches in a batch normalisation, after two steps on whole batches and one on an uneven one."""
    from unidist_oneflow import zoo

    model, optimizer = strategy.prepare(zoo.with_buffers(), unidist.SGD(0.1))
    step = strategy.train_step(model, optimizer, zoo.cross_entropy)
    for x, y in strategy.loader(reference.data(4 * strategy.world_size * 2 + 5), per_device_batch=4):
        step(x, y)
    return int(strategy._backend.state(model)["1.num_batches_tracked"].numpy())


def layers_that_change_their_mode(strategy: unidist.Strategy) -> float:
    """How far the running mean moved after the batch normalisation was put into evaluation mode. (One more layer has
    nothing to do with the loss, which must not matter.)"""
    from oneflow import nn

    from unidist_oneflow import zoo

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.normal, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
            self.unused = nn.Linear(2, 2)

        def forward(self, x: Any) -> Any:
            return self.last(self.normal(self.first(x)))

    with contextlib.redirect_stderr(io.StringIO()):  # the ranks begin differently
        model, optimizer = strategy.prepare(Net(), unidist.SGD(0.1))
    step = strategy.train_step(model, optimizer, zoo.cross_entropy)
    x, y = (strategy._backend.from_numpy(each) for each in reference.data(4))
    step(x, y)
    model.normal.eval()
    before = strategy._backend.state(model)["normal.running_mean"].numpy().copy()
    step(x, y)
    return float(abs(strategy._backend.state(model)["normal.running_mean"].numpy() - before).max())


def dropout_resumed(strategy: unidist.Strategy, folder: str) -> tuple[list[float], list[float]]:
    """Losses after a checkpoint, and those of a run that was resumed from it."""
    from oneflow import nn

    from unidist_oneflow import zoo

    x, y = (strategy._backend.from_numpy(each) for each in reference.data(4))

    def make() -> Any:
        model, optimizer = strategy.prepare(
            nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4)), unidist.SGD(0.1)
        )
        step = strategy.train_step(model, optimizer, zoo.cross_entropy)
        return {"model": model, "optimizer": optimizer}, lambda: float(step(x, y).numpy())

    with contextlib.redirect_stderr(io.StringIO()):  # the ranks begin differently; dropout is not compiled
        (parts, step), (others, other_step) = make(), make()
    step()
    strategy.save(folder, **parts)
    losses = [step() for _ in range(3)]
    strategy.load(folder, **others)
    return losses, [other_step() for _ in range(3)]

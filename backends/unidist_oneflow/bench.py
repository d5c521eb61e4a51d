"""What `unidist bench step --backend oneflow` compares: DDP, or nn.Graph, by hand, and the same through unidist."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle, islice

import numpy as np
import oneflow as flow
from oneflow import nn

import unidist
from unidist_oneflow.models import OneFlowBackend

BATCHES, FEATURES, CLASSES, BATCH = 50, 784, 10, 64

Batches = Sequence[tuple[flow.Tensor, flow.Tensor]]


def contestants(strategy: unidist.Strategy) -> dict[str, Callable[[int], None]]:
    numbers = np.random.RandomState(strategy.rank)
    batches = [
        (
            flow.from_numpy(numbers.standard_normal((BATCH, FEATURES)).astype(np.float32)),
            flow.from_numpy(numbers.randint(0, CLASSES, BATCH)),
        )
        for _ in range(BATCHES)
    ]
    backend = strategy._backend
    assert isinstance(backend, OneFlowBackend)
    name, by_hand = {
        "mirrored": ("OneFlow's DDP by hand", ddp_by_hand),
        "consistent": ("nn.Graph by hand", graph_by_hand),
    }[backend.options.view]
    return {name: by_hand(batches), "unidist, the same batches": by_unidist(strategy, batches)}


def by_unidist(strategy: unidist.Strategy, batches: Batches) -> Callable[[int], None]:
    model, optimizer = strategy.prepare(mlp(), unidist.SGD(0.01, momentum=0.9))
    step = strategy.train_step(model, optimizer, lambda m, x, y: nn.functional.cross_entropy(m(x), y))
    coming = cycle(batches)

    def run(steps: int) -> None:
        for x, y in islice(coming, steps):
            step(x, y)
        strategy._backend.state(model)["0.bias"].numpy()  # OneFlow works in the background: wait for it

    return run


def ddp_by_hand(batches: Batches) -> Callable[[int], None]:
    model = nn.parallel.DistributedDataParallel(mlp())
    optimizer = flow.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    coming = cycle(batches)

    def run(steps: int) -> None:
        for x, y in islice(coming, steps):
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        model[0].bias.numpy()

    return run


def graph_by_hand(batches: Batches) -> Callable[[int], None]:
    placement, split = flow.placement.all("cpu"), flow.sbp.split(0)
    model = mlp().to_global(placement=placement, sbp=flow.sbp.broadcast)
    optimizer = flow.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    class Step(nn.Graph):  # type: ignore[misc]  # OneFlow is not there to be checked
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.add_optimizer(optimizer)

        def build(self, x: flow.Tensor, y: flow.Tensor) -> flow.Tensor:
            loss = nn.functional.cross_entropy(self.model(x), y)
            loss.backward()
            return loss

    graph, coming = Step(), cycle(batches)

    def run(steps: int) -> None:
        for x, y in islice(coming, steps):
            graph(x.to_global(placement=placement, sbp=split), y.to_global(placement=placement, sbp=split))
        model[0].bias.to_local().numpy()

    return run


def mlp() -> nn.Module:
    flow.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, CLASSES))

"""What `unidist bench step --backend oneflow` compares: OneFlow's DDP, or nn.Graph, by hand, and the same by unidist."""

from itertools import cycle, islice

import numpy as np
import oneflow as flow
from oneflow import nn

import unidist

BATCHES, FEATURES, CLASSES, BATCH = 50, 784, 10, 64


def contestants(strategy):
    numbers = np.random.RandomState(strategy.rank)
    batches = [
        (
            flow.from_numpy(numbers.standard_normal((BATCH, FEATURES)).astype(np.float32)),
            flow.from_numpy(numbers.randint(0, CLASSES, BATCH)),
        )
        for _ in range(BATCHES)
    ]
    by_hand = {"mirrored": ddp_by_hand, "consistent": graph_by_hand}[strategy._backend.options.view]
    return {by_hand.__doc__: by_hand(strategy, batches), "unidist, the same batches": by_unidist(strategy, batches)}


def by_unidist(strategy, batches):
    model, optimizer = strategy.prepare(mlp(), unidist.SGD(0.01, momentum=0.9))
    step = strategy.train_step(model, optimizer, lambda m, x, y: nn.functional.cross_entropy(m(x), y))
    coming = cycle(batches)

    def run(steps):
        for x, y in islice(coming, steps):
            step(x, y)
        strategy._backend.state(model)["0.bias"].numpy()  # OneFlow works in the background: wait for it

    return run


def ddp_by_hand(strategy, batches):
    """OneFlow's DDP by hand"""
    model = nn.parallel.DistributedDataParallel(mlp())
    optimizer = flow.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    coming = cycle(batches)

    def run(steps):
        for x, y in islice(coming, steps):
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        model[0].bias.numpy()

    return run


def graph_by_hand(strategy, batches):
    """nn.Graph by hand"""
    placement, split = flow.placement.all("cpu"), flow.sbp.split(0)
    model = mlp().to_global(placement=placement, sbp=flow.sbp.broadcast)
    optimizer = flow.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    class Step(nn.Graph):
        def __init__(self):
            super().__init__()
            self.model = model
            self.add_optimizer(optimizer)

        def build(self, x, y):
            loss = nn.functional.cross_entropy(self.model(x), y)
            loss.backward()
            return loss

    graph, coming = Step(), cycle(batches)

    def run(steps):
        for x, y in islice(coming, steps):
            graph(x.to_global(placement=placement, sbp=split), y.to_global(placement=placement, sbp=split))
        model[0].bias.to_local().numpy()

    return run


def mlp():
    flow.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, CLASSES))

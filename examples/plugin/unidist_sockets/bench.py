"""What `unidist bench step --backend sockets` compares: the loop by hand, and the same through unidist."""

from itertools import islice

import numpy as np

import unidist
from unidist_sockets import tiny

SAMPLES, FEATURES, CLASSES, BATCH = 12800, 784, 10, 64


def mlp():
    return tiny.Sequential(tiny.Linear(FEATURES, 128), tiny.ReLU(), tiny.Linear(128, CLASSES))


def contestants(strategy):
    numbers = np.random.RandomState(0)
    data = numbers.standard_normal((SAMPLES, FEATURES)).astype(np.float32), numbers.randint(0, CLASSES, SAMPLES)

    def batches():
        loader = strategy.loader(data, per_device_batch=BATCH, shuffle=True)
        while True:
            yield from loader

    by_hand = mlp()
    parameters = (parameter for _, module in by_hand.modules() for parameter in module.parameters.values())
    sgd = tiny.Optimizer(parameters, lr=0.01, momentum=0.9)
    model, optimizer = strategy.prepare(mlp(), unidist.SGD(0.01, momentum=0.9))
    step = strategy.train_step(model, optimizer, lambda m, x, y: tiny.cross_entropy(m(x), y).mean())
    first, second = batches(), batches()

    def hand_written(steps):
        for x, y in islice(first, steps):
            found = tiny.gradients(tiny.cross_entropy(by_hand(x), y).mean())
            for parameter, mean in zip(found, strategy.all_reduce([*found.values()]), strict=True):
                parameter.grad = mean
            sgd.step()

    def through_unidist(steps):
        for x, y in islice(second, steps):
            step(x, y)

    return {"by hand": hand_written, "unidist": through_unidist}

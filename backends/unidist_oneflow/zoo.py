"""The conformance suite's models, in OneFlow (see `unidist.testing.case.Case`)."""

import oneflow as flow
from oneflow import nn

from unidist.testing.reference import SIZES


def mlp():
    inputs, hidden, classes = SIZES
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, classes))


def with_buffers():
    inputs, hidden, classes = SIZES
    return nn.Sequential(nn.Linear(inputs, hidden), nn.BatchNorm1d(hidden), nn.Linear(hidden, classes))


def cross_entropy(model, x, y):
    return nn.functional.cross_entropy(model(x), y)


def per_sample_loss(model, x, y):
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def native_sgd(model, lr):
    return flow.optim.SGD(model.parameters(), lr=lr)


def draw():
    """Three numbers from the generator that dropout uses."""
    return flow.rand(3).numpy()


WEAK_TENSORS = False

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


def local_step(model, x, y, lr):
    """One plain SGD step on this process alone; in float64, as OneFlow's batch normalisation of two rows that are near
    each other is off by 4e-4 in float32."""
    model.to(flow.float64)
    model.zero_grad()
    cross_entropy(model, x.to(flow.float64), y).backward()
    with flow.no_grad():
        for parameter in model.parameters():
            parameter -= lr * parameter.grad
    model.to(flow.float32)


def data_loader(dataset, batch_size, shuffle):
    return flow.utils.data.DataLoader(dataset, batch_size=batch_size, shuffle=shuffle)


def draw():
    """Three numbers from the generator that dropout uses."""
    return flow.rand(3).numpy()


WEAK_TENSORS = False

"""The conformance suite's models, in torch (see `unidist.testing.case.Case`)."""

import torch
from torch import nn

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
    return torch.optim.SGD(model.parameters(), lr=lr)


def local_step(model, x, y, lr):
    """One plain SGD step on this process alone."""
    model.zero_grad()
    cross_entropy(model, x, y).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= lr * parameter.grad


def draw():
    """Three numbers from the generator that dropout uses."""
    return torch.rand(3).numpy()


def data_loader(dataset, batch_size, shuffle):
    return torch.utils.data.DataLoader(dataset, batch_size=batch_size, shuffle=shuffle)


WEAK_TENSORS = True

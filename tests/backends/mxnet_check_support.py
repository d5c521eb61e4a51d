"""What the further checks of MXNet share: a model that is trained, and one whose shapes come late."""

import mxnet as mx
from mxnet.gluon import nn

from unidist.testing import reference
from unidist_mxnet.zoo import cross_entropy


def train(case, model, optimizer, samples=40, epochs=1, loss_fn=cross_entropy, clip_norm=None, **how):
    model, optimizer = case.strategy.prepare(model, optimizer, **how)
    step = case.strategy.train_step(model, optimizer, loss_fn, clip_norm=clip_norm)
    loader = case.strategy.loader(reference.data(samples), per_device_batch=4, shuffle=True, seed=3)
    for _ in range(epochs):
        for x, y in loader:
            step(x, y)
    return model, optimizer


def undecided(hybrid=True):
    """Its first layer learns its input size from the data."""
    _, hidden, classes = reference.SIZES
    model = nn.HybridSequential()
    model.add(nn.Dense(hidden), nn.Activation("tanh"), nn.Dense(classes))
    model.initialize(mx.init.Normal(0.3))
    if hybrid:
        model.hybridize()
    return model

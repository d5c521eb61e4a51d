"""The conformance suite's models, in Gluon (see `unidist.testing.case.Case`)."""

import mxnet as mx
from mxnet.gluon import nn

from unidist.testing.reference import SIZES


def mlp():
    inputs, hidden, classes = SIZES
    return _initialised(nn.Dense(hidden, in_units=inputs), nn.Activation("tanh"), nn.Dense(classes, in_units=hidden))


def with_buffers():
    inputs, hidden, classes = SIZES
    return _initialised(
        nn.Dense(hidden, in_units=inputs), nn.BatchNorm(in_channels=hidden), nn.Dense(classes, in_units=hidden)
    )


def _initialised(*layers):
    model = nn.HybridSequential()
    model.add(*layers)
    model.initialize()
    return model


def cross_entropy(model, x, y):
    return per_sample_loss(model, x, y).mean()


def per_sample_loss(model, x, y):
    # Not SoftmaxCrossEntropyLoss: oneDNN's log_softmax is off by up to 4e-6, more than all other errors together.
    logits = model(x)
    logits = logits - logits.max(axis=1, keepdims=True)
    return logits.exp().sum(axis=1).log() - mx.nd.pick(logits, y)


def native_sgd(model, lr):
    return mx.gluon.Trainer(model.collect_params(), "sgd", {"learning_rate": lr})


def local_step(model, x, y, lr):
    """One plain SGD step on this process alone."""
    with mx.autograd.record():
        loss = cross_entropy(model, x, y)
    loss.backward()
    for parameter in model.collect_params().values():
        if parameter.grad_req != "null":
            parameter.set_data(parameter.data() - lr * parameter.grad())


def data_loader(dataset, batch_size, shuffle):
    return mx.gluon.data.DataLoader(dataset, batch_size=batch_size, shuffle=shuffle)


def draw():
    """Three numbers from the generator that dropout uses."""
    return mx.nd.random.uniform(shape=3).asnumpy()


WEAK_TENSORS = False

"""The conformance suite's models, in Gluon (see `unidist.testing.case.Case`)."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
from mxnet.gluon import nn

from unidist.plugin import SIZES


def mlp() -> nn.HybridBlock:
    inputs, hidden, classes = SIZES
    return _initialised(nn.Dense(hidden, in_units=inputs), nn.Activation("tanh"), nn.Dense(classes, in_units=hidden))


def with_buffers() -> nn.HybridBlock:
    inputs, hidden, classes = SIZES
    return _initialised(
        nn.Dense(hidden, in_units=inputs), nn.BatchNorm(in_channels=hidden), nn.Dense(classes, in_units=hidden)
    )


def _initialised(*layers: nn.HybridBlock) -> nn.HybridBlock:
    model = nn.HybridSequential()
    model.add(*layers)
    model.initialize()
    return model


def cross_entropy(model: nn.HybridBlock, x: mx.nd.NDArray, y: mx.nd.NDArray) -> mx.nd.NDArray:
    return per_sample_loss(model, x, y).mean()


def per_sample_loss(model: nn.HybridBlock, x: mx.nd.NDArray, y: mx.nd.NDArray) -> mx.nd.NDArray:
    # Not SoftmaxCrossEntropyLoss: oneDNN's log_softmax is off by up to 4e-6, more than all other errors together.
    logits = model(x)
    logits = logits - logits.max(axis=1, keepdims=True)
    return logits.exp().sum(axis=1).log() - mx.nd.pick(logits, y)


def native_sgd(model: nn.HybridBlock, lr: float) -> mx.gluon.Trainer:
    return mx.gluon.Trainer(model.collect_params(), "sgd", {"learning_rate": lr})


def local_step(model: nn.HybridBlock, x: mx.nd.NDArray, y: mx.nd.NDArray, lr: float) -> None:
    """One plain SGD step on this process alone."""
    with mx.autograd.record():
        loss = cross_entropy(model, x, y)
    loss.backward()
    for parameter in model.collect_params().values():
        if parameter.grad_req != "null":
            parameter.set_data(parameter.data() - lr * parameter.grad())


def data_loader(dataset: Any, batch_size: int, shuffle: bool) -> mx.gluon.data.DataLoader:
    return mx.gluon.data.DataLoader(dataset, batch_size=batch_size, shuffle=shuffle)


def native_backward(model: nn.HybridBlock, x: mx.nd.NDArray, y: mx.nd.NDArray) -> None:
    with mx.autograd.record():
        loss = cross_entropy(model, x, y)
    loss.backward()


def native_step(
    model: nn.HybridBlock, optimizer: mx.gluon.Trainer | mx.optimizer.Optimizer, x: mx.nd.NDArray, y: mx.nd.NDArray
) -> None:
    """What the loop had before unidist."""
    trainer = optimizer
    if not isinstance(trainer, mx.gluon.Trainer):
        trainer = mx.gluon.Trainer(model.collect_params(), optimizer, kvstore=None)
    native_backward(model, x, y)
    trainer.step(1)


def clear_gradients(model: nn.HybridBlock, optimizer: mx.gluon.Trainer | mx.optimizer.Optimizer) -> None:
    model.collect_params().zero_grad()


def halve_gradients(model: nn.HybridBlock) -> None:
    for parameter in model.collect_params().values():
        for gradient in parameter.list_grad():
            gradient /= 2


def set_trained(model: nn.HybridBlock, trained: bool) -> None:
    """Freeze or unfreeze the first layer."""
    model[0].collect_params().setattr("grad_req", "write" if trained else "null")


def draw() -> np.ndarray[Any, Any]:
    """Three numbers from the generator that dropout uses."""
    numbers: np.ndarray[Any, Any] = mx.nd.random.uniform(shape=3).asnumpy()
    return numbers

"""The examples' model in MXNet Gluon."""

import mxnet as mx
from mxnet.gluon import nn

import models

_cross_entropy = mx.gluon.loss.SoftmaxCrossEntropyLoss()


class CNN(nn.HybridBlock):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2D(8, 3, padding=1, in_channels=1, activation="relu")
        self.conv2 = nn.Conv2D(16, 3, padding=1, in_channels=8, activation="relu")
        self.pool = nn.MaxPool2D(2)
        self.output = nn.Dense(10, in_units=64)

    def hybrid_forward(self, F, x):
        x = self.pool(self.conv1(x))
        x = self.pool(self.conv2(x))
        return self.output(x)


def cnn(seed):
    model = CNN()
    model.initialize()
    weights = models.initial_weights(seed)
    for name, parameter in model._collect_params_with_prefix().items():
        parameter.set_data(mx.nd.array(weights[name]))
    model.hybridize()
    return model


def cross_entropy(logits, labels):
    return _cross_entropy(logits, labels).mean()  # Gluon's losses come one for each sample


def correct(logits, labels):
    """One number for each sample: 1 where the class is right."""
    return logits.argmax(axis=1).astype("int64") == labels

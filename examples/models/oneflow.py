"""The examples' model in OneFlow."""

import oneflow as flow
from oneflow import nn
from oneflow.nn import functional as F

import models


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.output = nn.Linear(64, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.output(x.flatten(1))


def cnn(seed):
    model = CNN()
    model.load_state_dict({name: flow.from_numpy(array) for name, array in models.initial_weights(seed).items()})
    return model


def cross_entropy(logits, labels):
    return F.cross_entropy(logits, labels)


def correct(logits, labels):
    """One number for each sample: 1 where the class is right."""
    return (logits.argmax(1) == labels).to(flow.float32)

"""The judge: a two-layer perceptron, its gradients and its optimizers, serial, in NumPy float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from unidist.optim import SGD, Adam, AdamW, OptimizerSpec

Array = np.ndarray[Any, np.dtype[np.float64]]
SIZES = (6, 8, 4)  # inputs, hidden units, classes


def data(samples: int, seed: int = 7) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """`samples` points in float32, and their classes."""
    numbers = np.random.RandomState(seed)  # the legacy generator: its stream is frozen for ever
    x = numbers.standard_normal((samples, SIZES[0])).astype(np.float32)
    return x, numbers.randint(0, SIZES[2], samples)


def weights(seed: int = 1) -> list[np.ndarray[Any, Any]]:
    """weight and bias of both layers, rows are outputs, in float32."""
    numbers = np.random.RandomState(seed)
    shapes = [(SIZES[1], SIZES[0]), (SIZES[1],), (SIZES[2], SIZES[1]), (SIZES[2],)]
    return [(0.5 * numbers.standard_normal(shape)).astype(np.float32) for shape in shapes]


class Serial:
    """One process that trains on whole global batches: tanh between the layers, mean softmax cross-entropy."""

    def __init__(self, parameters: Sequence[np.ndarray[Any, Any]], spec: OptimizerSpec) -> None:
        self.parameters = [np.array(p, dtype=np.float64) for p in parameters]
        self._spec = spec
        self._first = [np.zeros_like(p) for p in self.parameters]  # velocity, or Adam's first moment
        self._second = [np.zeros_like(p) for p in self.parameters]
        self._updates = 0

    def logits(self, x: np.ndarray[Any, Any]) -> Array:
        w1, b1, w2, b2 = self.parameters
        return np.asarray(np.tanh(x.astype(np.float64) @ w1.T + b1) @ w2.T + b2)

    def loss_and_gradients(self, x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> tuple[float, list[Array]]:
        w1, b1, w2, b2 = self.parameters
        x = x.astype(np.float64)
        hidden = np.tanh(x @ w1.T + b1)
        logits = hidden @ w2.T + b2
        shifted = logits - logits.max(axis=1, keepdims=True)
        log_p = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        rows = np.arange(len(y))
        d_logits = np.exp(log_p)
        d_logits[rows, y] -= 1
        d_logits /= len(y)
        d_hidden = d_logits @ w2 * (1 - hidden**2)
        gradients = [d_hidden.T @ x, d_hidden.sum(axis=0), d_logits.T @ hidden, d_logits.sum(axis=0)]
        return float(-log_p[rows, y].mean()), gradients

    def step(self, x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], clip_norm: float | None = None) -> float:
        loss, gradients = self.loss_and_gradients(x, y)
        if clip_norm is not None:
            norm = np.sqrt(sum((g**2).sum() for g in gradients))
            gradients = [g * min(1.0, clip_norm / (norm + 1e-6)) for g in gradients]
        self.apply(gradients)
        return loss

    def apply(self, gradients: list[Array]) -> None:
        spec, rate = self._spec, self._spec.rate(self._updates)
        self._updates += 1
        for i, (parameter, gradient) in enumerate(zip(self.parameters, gradients, strict=True)):
            if isinstance(spec, AdamW):
                parameter *= 1 - rate * spec.weight_decay
            else:
                gradient = gradient + spec.weight_decay * parameter
            if isinstance(spec, Adam):
                b1, b2 = spec.betas
                self._first[i] = b1 * self._first[i] + (1 - b1) * gradient
                self._second[i] = b2 * self._second[i] + (1 - b2) * gradient**2
                first = self._first[i] / (1 - b1**self._updates)
                second = self._second[i] / (1 - b2**self._updates)
                parameter -= rate * first / (np.sqrt(second) + spec.eps)
            elif isinstance(spec, SGD):
                self._first[i] = spec.momentum * self._first[i] + gradient
                parameter -= rate * (gradient + spec.momentum * self._first[i] if spec.nesterov else self._first[i])

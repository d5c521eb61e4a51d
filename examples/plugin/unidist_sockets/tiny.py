"""The framework of this example: layers, gradients and optimizers in NumPy. It knows nothing of unidist."""

from __future__ import annotations

import numpy as np

generator = np.random.RandomState(0)  # what initial weights are drawn from
recording = True  # whether the way back to the parameters is kept


class Tensor(np.ndarray):
    """Data: a batch, a parameter's values, a result."""


def tensor(array):
    return np.asarray(array).view(Tensor)


class Node:
    """A value on the way from parameters to a loss; `parents` are pairs (node, gradient here -> gradient there)."""

    def __init__(self, data, *parents):
        self.data, self.parents = np.asarray(data), parents

    shape = property(lambda self: self.data.shape)
    dtype = property(lambda self: self.data.dtype)

    def __add__(self, other):
        return result(self.data + node(other).data, (self, lambda g: g), (node(other), lambda g: g))

    def __mul__(self, number):
        return result(self.data * number, (self, lambda g: g * number))

    __radd__, __rmul__ = __add__, __mul__

    def mean(self):
        return result(self.data.mean(), (self, lambda g: np.broadcast_to(g / self.data.size, self.shape)))

    def detach(self):
        return tensor(self.data)


class Parameter(Node):
    def __init__(self, data):
        super().__init__(np.asarray(data, np.float32))
        self.grad, self.trained = None, True


def node(value):
    return value if isinstance(value, Node) else Node(value)


def result(data, *parents):
    return Node(data, *parents) if recording else tensor(data)


def order_of(value, before):
    """`before`, and then all that this value was made of, parents first."""
    for parent, _ in value.parents:
        if parent not in before:
            order_of(parent, before)
    before[value] = None
    return before


def gradients(loss):
    """Parameter -> d loss / d parameter."""
    found = {loss: np.ones_like(loss.data)}
    for current in reversed(order_of(loss, {})):
        for parent, back in current.parents:
            found[parent] = found.get(parent, 0) + back(found[current])
    return {leaf: gradient for leaf, gradient in found.items() if isinstance(leaf, Parameter) and leaf.trained}


def cross_entropy(logits, labels):
    """One loss for each row."""
    logits, labels = node(logits), np.asarray(labels)
    shifted = logits.data - logits.data.max(axis=1, keepdims=True)
    log_p, rows = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)), np.arange(len(labels))

    def back(g):
        return (np.exp(log_p) - (labels[:, None] == np.arange(log_p.shape[1]))) * g[:, None]

    return result(-log_p[rows, labels], (logits, back))


class Module:
    def __init__(self, *children, **parameters):
        self.children, self.buffers, self.training, self.listeners = children, {}, True, []
        self.parameters = {name: Parameter(data) for name, data in parameters.items()}

    def __call__(self, *inputs):
        for listener in self.listeners:
            listener(inputs)
        return self.forward(*(node(value) for value in inputs))

    def modules(self, prefix=""):
        """(prefix of names, module) of this one and of all inside."""
        yield prefix, self
        for number, child in enumerate(self.children):
            yield from child.modules(f"{prefix}{number}.")


class Sequential(Module):
    def forward(self, x):
        for child in self.children:
            x = child(x)
        return x


class Linear(Module):
    def __init__(self, inputs, outputs):
        super().__init__(weight=generator.normal(0, inputs**-0.5, (outputs, inputs)), bias=np.zeros(outputs))

    def forward(self, x):
        w, b = self.parameters["weight"], self.parameters["bias"]
        back = (x, lambda g: g @ w.data), (w, lambda g: g.T @ x.data), (b, lambda g: g.sum(axis=0))
        return result(x.data @ w.data.T + b.data, *back)


class Tanh(Module):
    def forward(self, x):
        y = np.tanh(x.data)
        return result(y, (x, lambda g: g * (1 - y**2)))


class ReLU(Module):
    def forward(self, x):
        return result(np.maximum(x.data, 0), (x, lambda g: g * (x.data > 0)))


class BatchNorm(Module):
    def __init__(self, features):
        super().__init__(weight=np.ones(features), bias=np.zeros(features))
        self.buffers = {"running_mean": tensor(np.zeros(features, np.float32))}
        self.buffers["running_var"] = tensor(np.ones(features, np.float32))

    def forward(self, x):
        w, b, running = self.parameters["weight"], self.parameters["bias"], self.buffers
        seen = {"running_mean": x.data.mean(axis=0), "running_var": x.data.var(axis=0)} if self.training else running
        scale = 1 / np.sqrt(np.asarray(seen["running_var"]) + 1e-5)
        y = (x.data - np.asarray(seen["running_mean"])) * scale
        for name in running if self.training else ():
            running[name][...] = 0.9 * running[name] + 0.1 * seen[name]

        def back(g):
            g = g * w.data * scale
            return g - g.mean(axis=0) - y * (g * y).mean(axis=0) if self.training else g

        return result(y * w.data + b.data, (x, back), (w, lambda g: (g * y).sum(axis=0)), (b, lambda g: g.sum(axis=0)))


class Optimizer:
    """`kind` is SGD (momentum, nesterov), Adam or AdamW (betas, eps); all have lr and weight_decay."""

    def __init__(self, parameters, kind="SGD", **settings):
        self.parameters, self.kind = list(parameters), kind
        self.settings = {"weight_decay": 0.0, "momentum": 0.0, "nesterov": False, **settings}
        slots = ("velocity",) if kind == "SGD" else ("first_moment", "second_moment")
        self.slots = {p: {slot: np.zeros_like(p.data) for slot in slots} for p in self.parameters}
        self.updates = 0

    def clear(self):
        for parameter in self.parameters:
            parameter.grad = None

    def step(self):
        lr, decay = self.settings["lr"], self.settings["weight_decay"]
        self.updates += 1
        for parameter in self.parameters:
            gradient, slots = parameter.grad, self.slots[parameter]
            if self.kind == "AdamW":
                parameter.data *= 1 - lr * decay
            else:
                gradient = gradient + decay * parameter.data
            if self.kind == "SGD":
                momentum, velocity = self.settings["momentum"], slots["velocity"]
                velocity[...] = momentum * velocity + gradient
                parameter.data -= lr * (gradient + momentum * velocity if self.settings["nesterov"] else velocity)
                continue
            moments = zip(slots.values(), self.settings["betas"], (gradient, gradient**2), strict=True)
            for moment, beta, new in moments:
                moment[...] = beta * moment + (1 - beta) * new
            first, second = (
                moment / (1 - beta**self.updates)
                for moment, beta in zip(slots.values(), self.settings["betas"], strict=True)
            )
            parameter.data -= lr * first / (np.sqrt(second) + self.settings["eps"])

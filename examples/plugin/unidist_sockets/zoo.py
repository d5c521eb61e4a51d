"""The conformance suite's models, in tiny (see `unidist.testing.case.Case`)."""

from unidist.plugin import SIZES
from unidist_sockets import tiny

inputs, hidden, classes = SIZES


def mlp():
    return tiny.Sequential(tiny.Linear(inputs, hidden), tiny.Tanh(), tiny.Linear(hidden, classes))


def with_buffers():
    return tiny.Sequential(tiny.Linear(inputs, hidden), tiny.BatchNorm(hidden), tiny.Linear(hidden, classes))


def per_sample_loss(model, x, y):
    return tiny.cross_entropy(model(x), y)


def cross_entropy(model, x, y):
    return per_sample_loss(model, x, y).mean()


def parameters(model):
    return [each for _, own in model.modules() for each in own.parameters.values()]


def native_sgd(model, lr):
    return tiny.Optimizer((each for each in parameters(model) if each.trained), lr=lr)


def native_backward(model, x, y):
    for each, gradient in tiny.gradients(cross_entropy(model, x, y)).items():
        each.grad = gradient if each.grad is None else each.grad + gradient


def native_step(model, optimizer, x, y):
    native_backward(model, x, y)
    optimizer.step()


def clear_gradients(model, optimizer):
    optimizer.clear()


def halve_gradients(model):
    for each in parameters(model):
        each.grad /= 2


def set_trained(model, trained):
    """Freeze or unfreeze the first layer."""
    for each in model.children[0].parameters.values():
        each.trained = trained


def draw():
    return tiny.generator.rand(3)

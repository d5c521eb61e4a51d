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
    return [parameter for _, module in model.modules() for parameter in module.parameters.values()]


def native_sgd(model, lr):
    return tiny.Optimizer((parameter for parameter in parameters(model) if parameter.trained), lr=lr)


def native_backward(model, x, y):
    for parameter, gradient in tiny.gradients(cross_entropy(model, x, y)).items():
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def native_step(model, optimizer, x, y):
    native_backward(model, x, y)
    optimizer.step()


def clear_gradients(model, optimizer):
    optimizer.clear()


def halve_gradients(model):
    for parameter in parameters(model):
        parameter.grad /= 2


def set_trained(model, trained):
    """Freeze or unfreeze the first layer."""
    for parameter in model.children[0].parameters.values():
        parameter.trained = trained


def draw():
    return tiny.generator.rand(3)

"""Further checks for real ranks with MXNet: gradients that wait, weights that travel, copies that optimizers keep."""

import mxnet as mx
import numpy as np
from mxnet.gluon import nn

from unidist import SGD, Adam, AdamW
from unidist.checkpoint import read, write
from unidist.errors import CheckpointError, StateError
from unidist.testing import reference
from unidist.testing.case import check, close, refused
from unidist_mxnet.zoo import cross_entropy


class ManyHeads(nn.HybridSequential):
    """The suite's model and, beside it, a dozen layers that are smaller than any of its own and that no loss uses."""

    def __init__(self):
        super().__init__()
        inputs, hidden, classes = reference.SIZES
        self.add(nn.Dense(hidden, in_units=inputs), nn.Activation("tanh"), nn.Dense(classes, in_units=hidden))
        self.unused = [nn.Dense(1, in_units=1) for _ in range(12)]
        for number, each in enumerate(self.unused):
            self.register_child(each, f"unused{number}")

    def forward(self, x):
        for layer in (self[0], self[1], self[2]):
            x = layer(x)
        return x


def with_many_heads(case):
    model = ManyHeads()
    model.initialize()
    used = [each for layer in (model[0], model[2]) for each in (layer.weight, layer.bias)]
    for each, values in zip(used, reference.weights(), strict=True):
        each.set_data(mx.nd.array(values))
    return model, used


@check
def gradients_of_one_layer_cleared_in_a_group(case):
    """By whatever Gluon offers for it, now or by an array that was asked for long ago. To look at them does no harm."""

    def by_array_of_old(parameter, old):
        old[:] = 0

    for clear in (lambda p, old: p.zero_grad(), lambda p, old: p.grad().__imul__(0), by_array_of_old):
        model, used = with_many_heads(case)
        model, optimizer = case.strategy.prepare(model, SGD(0.5), accumulate=2)
        step = case.strategy.train_step(model, optimizer, cross_entropy)
        old = used[0].grad()
        loader = case.strategy.loader(reference.data(16 * case.size), per_device_batch=4, shuffle=True, seed=3)
        for x, y in loader:
            step(x, y)
            assert np.isfinite(sum(float(each.grad().norm().asscalar()) for each in used))
        if case.strategy.capabilities.synchronous is True:
            expected, _ = case.train_serially(SGD(0.5), 16 * case.size, epochs=1, accumulate=2)
            close([each.data().asnumpy() for each in used], expected.parameters)
        clear(used[0], old)  # between two groups
        x, y = (case.backend.from_numpy(each) for each in reference.data(4 * case.backend.devices))
        step(x, y)
        clear(used[0], old)
        with refused(StateError, "group"):
            step(x, y)
        step(x, y)  # the first of a new group
        step(x, y)


@check
def uneven_batches_with_every_kind_of_update(case):
    """The mean weight divides the gradients of some on their way into the update, of others before it."""
    samples = 8 * case.size * case.backend.devices + 3
    for spec in (
        SGD(0.1, weight_decay=0.01),
        SGD(0.1, momentum=0.9, weight_decay=0.01),
        SGD(lambda update: 0.1 / (1 + update), momentum=0.9, weight_decay=0.01),
        SGD(lambda update: 0.1 * (update % 2), momentum=0.9),
        SGD(0.1, momentum=0.9, nesterov=True),
        Adam(0.01, weight_decay=0.01),
        AdamW(0.01, weight_decay=0.01),
    ):
        for accumulate in (1, 2):
            model, optimizer = case.strategy.prepare(case.mlp(), spec, accumulate=accumulate)
            step = case.strategy.train_step(model, optimizer, cross_entropy)
            loader = case.strategy.loader(reference.data(samples), per_device_batch=4, shuffle=True, seed=3)
            for _ in range(2):
                for x, y in loader:
                    step(x, y)
            expected, _ = case.train_serially(spec, samples, accumulate=accumulate)
            close(case.parameters(model), expected.parameters, tolerance=5e-6)


@check
def native_optimizer_and_uneven_batches(case):
    """Without a sample on some rank, and on all of them."""
    model, optimizer = case.strategy.prepare(case.mlp(), mx.optimizer.create("sgd", learning_rate=0.5))
    other, spec = case.strategy.prepare(case.mlp(), SGD(0.5))
    x, y = (case.backend.from_numpy(each) for each in reference.data(4 * case.backend.devices))
    for weight in (case.rank + 1, 0 if case.rank else 3, 0, 4):
        before = case.parameters(model)
        for each in ((model, optimizer), (other, spec)):
            loss = case.strategy.train_step(*each, cross_entropy)(x, y, weight=weight)
            assert np.isfinite(float(loss.asscalar()))
        close(case.parameters(model), case.parameters(other))
        if weight == 0 and case.rank == 0:
            close(case.parameters(model), before, tolerance=0)


class Halves(mx.gluon.HybridBlock):
    """One parameter in float16, of what MXNet computes on any device."""

    def __init__(self):
        super().__init__()
        self.scale = self.params.get("scale", shape=(4,), dtype="float16", init=mx.init.One())

    def hybrid_forward(self, F, x, scale):
        return x * scale


def prepared_halves(case, **how):
    model = Halves()
    model.initialize()
    native = mx.optimizer.create("sgd", learning_rate=0.5, momentum=0.9, multi_precision=True)
    model, optimizer = case.strategy.prepare(model, native, **how)
    return model, case.strategy.train_step(model, optimizer, lambda m, x: m(x).mean())


@check
def parameters_of_float16_are_loaded(case):
    """The optimizer's copy in float32 follows them."""
    x = mx.nd.ones((2, 4), dtype="float16")
    model, step = prepared_halves(case)
    case.strategy.save(f"{case.folder}/halves", model=model)
    step(x)
    step(x)
    case.strategy.load(f"{case.folder}/halves", model=model)
    close(case.parameters(model), [np.ones(4)], tolerance=0)
    step(x * 0)  # what is left is the momentum: less than the two updates that were undone
    (now,) = case.parameters(model)
    velocity = 0.25 * 0.9 + 0.25
    close([now], [np.full(4, 1 - 0.5 * 0.9 * velocity)], tolerance=1e-3)


@check
def parameters_of_float16_are_averaged(case):
    """In local SGD; and where an average changes nothing, the copy keeps what float16 cannot hold."""
    model, step = prepared_halves(case, sync_every=2)
    for _ in range(2):
        step(mx.nd.full((2, 4), 1 + case.rank, dtype="float16"))
    (together,) = case.parameters(model)
    step(mx.nd.zeros((2, 4), dtype="float16"))
    (now,) = case.parameters(model)
    for theirs in case.strategy.all_gather(together):
        close([theirs], [together], tolerance=0)
    velocity = (0.25 * 0.9 + 0.25) * (1 + case.rank)
    close([now], [together - 0.5 * 0.9 * velocity], tolerance=2e-3)


@check
def velocity_of_another_framework_is_saved_again(case):
    """It counts no updates of each parameter, so its velocities come without them."""
    model, optimizer = case.strategy.prepare(case.mlp(), SGD(0.1, momentum=0.9))
    names = list(case.backend.state(model))
    velocities = {
        f"{name}/velocity": np.full(each.shape, 1.0 + n)
        for n, (name, each) in enumerate(zip(names, case.parameters(model), strict=True))
    }
    values = {"kind": "SGD", "groups": [{"lr": 0.1, "weight_decay": 0.0}]}
    case.backend.load_optimizer_state(model, optimizer, velocities, values)()
    case.strategy.save(f"{case.folder}/again", model=model, optimizer=optimizer)
    saved, _ = case.backend.optimizer_state(model, optimizer)
    if case.rank == 0:
        assert saved.keys() == velocities.keys(), saved.keys()
        close([saved[name].asnumpy() for name in velocities], velocities.values())


@check
def scale_that_the_model_does_not_look_at(case):
    """A batch normalisation with scale=False takes ones for its gamma, whatever it was given."""
    model = nn.HybridSequential()
    model.add(nn.BatchNorm(scale=False, in_channels=3))
    model.initialize()
    model = case.strategy.prepare(model)
    case.strategy.save(f"{case.folder}/scale", model=model)
    case.strategy.load(f"{case.folder}/scale", model=model)
    with case.strategy.main_first():
        if case.rank == 0:
            found = read(f"{case.folder}/scale")
            trained = np.full(3, 0.5, np.float32)  # as torch's would be
            write(f"{case.folder}/scale", found.arrays | {"model/0.weight": trained}, found.values)
    with refused(CheckpointError, "0.weight is not all ones", "scale=False"):
        case.strategy.load(f"{case.folder}/scale", model=model)

"""Further checks for real ranks with MXNet: parameters whose shapes come with the first batch."""

import mxnet as mx
import numpy as np
from mxnet.gluon import nn
from mxnet_check_support import train, undecided

from unidist import SGD, Adam
from unidist.errors import StateError
from unidist.testing import reference
from unidist.testing.case import check, close, refused
from unidist_mxnet.zoo import cross_entropy


@check
def deferred_initialisation(case):
    """Shapes come with the first batch: until then every rank has other numbers, from then on the same."""
    for hybrid in (False, True):
        mx.random.seed(100 + case.rank)
        model, _ = train(case, undecided(hybrid), Adam(0.01))
        for theirs in case.strategy.all_gather(case.parameters(model)):
            close(theirs, case.parameters(model), tolerance=0)


@check
def deferred_initialisation_spelled_out(case):
    mx.random.seed(100 + case.rank)
    model, optimizer = case.strategy.prepare(undecided(), SGD(0.1))
    for x, y in case.strategy.loader(reference.data(16), per_device_batch=4):
        with case.strategy.forward(model):
            loss = cross_entropy(model, x, y)
        case.strategy.backward(loss)
        case.strategy.step(optimizer)
    for theirs in case.strategy.all_gather(case.parameters(model)):
        close(theirs, case.parameters(model), tolerance=0)


@check
def deferred_initialisation_after_a_bad_start(case):
    """A batch that fails, a loss that passes the model by, hooks of one's own, nothing to save yet: then it trains."""
    model, optimizer = case.strategy.prepare(undecided(), SGD(0.1), accumulate=2)
    called = []
    model.register_forward_pre_hook(lambda *_: called.append(1))
    x, y = (case.backend.from_numpy(each) for each in reference.data(4))
    past = case.strategy.train_step(model, optimizer, lambda m, x, y: cross_entropy(lambda z: m[2](m[0](z)), x, y))
    step = case.strategy.train_step(model, optimizer, cross_entropy)
    with refused(StateError, "call the model"):
        case.strategy.save(f"{case.folder}/too-early", model=model)
    with refused(ValueError):
        step("no array", y)
    with refused(StateError, "call the model itself"):
        past(x, y)
    for a, b in case.strategy.loader(reference.data(16 * case.size), per_device_batch=4):
        step(a, b)
    assert called
    for theirs in case.strategy.all_gather(case.parameters(model)):
        close(theirs, case.parameters(model), tolerance=0)
    case.strategy.save(f"{case.folder}/deferred", model=model)
    again, _ = case.strategy.prepare(undecided(), SGD(0.1))
    with refused(StateError, "call the model"):
        case.strategy.load(f"{case.folder}/deferred", model=again)
    again(x)
    case.strategy.load(f"{case.folder}/deferred", model=again)
    close(case.parameters(again), case.parameters(model), tolerance=0)


@check
def convolutions_whose_shapes_come_late(case):
    """Evaluation lays their weights out as oneDNN likes it, which neither a store nor Horovod can read."""
    for make in (small_convolutions, lambda: mx.gluon.model_zoo.vision.resnet18_v1(classes=4, thumbnail=True)):
        mx.random.seed(100 + case.rank)
        model = make()
        model.initialize(mx.init.Xavier())
        model.hybridize()
        model, optimizer = case.strategy.prepare(model, SGD(0.01))
        step = case.strategy.train_step(model, optimizer, cross_entropy)
        x = mx.nd.array(np.random.RandomState(case.rank).standard_normal((2, 3, 16, 16)))
        for _ in range(2):
            step(x, mx.nd.array([0, 1])).wait_to_read()
            with case.strategy.evaluate(model):
                own = model(mx.nd.ones((1, 3, 16, 16))).asnumpy()
            for theirs in case.strategy.all_gather(own):
                close([theirs], [own], tolerance=0)
        case.backend.load_state(model, {k: case.backend.to_numpy(v) for k, v in case.backend.state(model).items()})
        step(x, mx.nd.array([0, 1])).wait_to_read()


def small_convolutions():
    model = nn.HybridSequential()
    model.add(nn.Conv2D(16, 3, padding=1), nn.BatchNorm(), nn.Conv2D(32, 3, padding=1), nn.Flatten(), nn.Dense(4))
    return model

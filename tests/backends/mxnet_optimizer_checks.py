"""Further checks for real ranks with MXNet: its optimizers and Trainers, their rates, and what they keep."""

import mxnet as mx
import numpy as np
from mxnet.gluon import nn
from mxnet_check_support import train, undecided

from unidist import SGD
from unidist.errors import StateError, UnsupportedOperation, UsageError
from unidist.testing import reference
from unidist.testing.case import check, close, refused
from unidist_mxnet.zoo import cross_entropy


def train_alone(case, optimizer):
    """The parameters after MXNet itself applied the optimizer to the whole batches."""
    from unidist.data.order import permutation

    model = case.mlp()
    trainer = mx.gluon.Trainer(model.collect_params(), optimizer, kvstore=None)
    x, y = reference.data(40)
    order, whole = permutation(40, 3, 0), 4 * case.backend.devices * case.size
    for first in range(0, 40, whole):
        rows = order[first : first + whole]
        with mx.autograd.record():
            loss = cross_entropy(model, mx.nd.array(x[rows]), mx.nd.array(y[rows]))
        loss.backward()
        trainer.step(1)
    return case.parameters(model)


@check
def native_optimizers(case):
    """An mx.optimizer one and a Trainer, with a scheduler, as MXNet itself would apply them to the whole batch."""
    for kind in ("adam", "nag"):

        def create(kind=kind):
            scheduler = mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.1)
            return mx.optimizer.create(kind, learning_rate=0.1, lr_scheduler=scheduler, wd=0.01)

        alone = train_alone(case, create())
        for make in (lambda model, o: o, lambda model, o: mx.gluon.Trainer(model.collect_params(), o)):
            model = case.mlp()
            close(case.parameters(train(case, model, make(model, create()))[0]), alone, tolerance=5e-6)


@check
def native_schedules(case):
    """A warm-up that begins elsewhere, updates that were made before, and a rate that only the scheduler knows."""
    schedulers = mx.lr_scheduler
    for make in (
        lambda: mx.optimizer.SGD(
            learning_rate=0.5,
            momentum=0.9,
            lr_scheduler=schedulers.FactorScheduler(
                100, base_lr=0.5, warmup_steps=3, warmup_begin_lr=0.01, warmup_mode="constant"
            ),
        ),
        lambda: mx.optimizer.SGD(
            learning_rate=0.5, begin_num_update=3, lr_scheduler=schedulers.MultiFactorScheduler([4, 6], 0.1, 0.5)
        ),
        lambda: mx.optimizer.Adam(learning_rate=0.1, begin_num_update=100),
        lambda: mx.optimizer.SGD(momentum=0.9, lr_scheduler=schedulers.FactorScheduler(2, 0.5, base_lr=0.3)),
    ):
        close(case.parameters(train(case, case.mlp(), make())[0]), train_alone(case, make()), tolerance=5e-6)


@check
def optimizers_that_would_go_wrong_are_refused(case):
    model = case.mlp()
    parameters = model.collect_params()
    factors = mx.optimizer.SGD(learning_rate=0.1)
    factors.set_lr_mult({0: 0.5})
    compressing = mx.gluon.Trainer(parameters, "sgd", compression_params={"type": "2bit", "threshold": 0.5})
    for optimizer, words in ((factors, "collect_params"), (compressing, "compression='2bit'")):
        with refused(UsageError, words):
            case.strategy.prepare(model, optimizer)
    on_servers = case.backend.options.server_updates
    other = mx.gluon.Trainer(parameters, "sgd", update_on_kvstore=not on_servers)
    with refused(UsageError, "update_on='worker'" if on_servers else "update_on='server'"):
        case.strategy.prepare(model, other)
    random = mx.optimizer.Nadam() if on_servers else mx.optimizer.SGLD()
    with refused(UnsupportedOperation, "update_on="):
        case.strategy.prepare(model, random)


@check
def settings_of_servers_that_are_changed_too_late(case):
    """Nothing of it would reach them."""
    for change in (
        lambda model, optimizer: setattr(optimizer, "wd", 0.5),
        lambda model, optimizer: model.collect_params().setattr("lr_mult", 0.0),
    ):
        model, optimizer = case.strategy.prepare(case.mlp(), mx.optimizer.SGD(learning_rate=0.1))
        step = case.strategy.train_step(model, optimizer, cross_entropy)
        batch = [case.backend.from_numpy(each) for each in reference.data(4)]
        step(*batch)
        change(model, optimizer)
        with refused(StateError, "after prepare()"):
            step(*batch)
    model, optimizer = case.strategy.prepare(undecided(), mx.optimizer.SGD(learning_rate=0.1))
    optimizer.wd = 0.5  # the shapes, and so the parameters, come to the servers later than this
    with refused(StateError, "wd was changed after prepare()"):
        case.strategy.train_step(model, optimizer, cross_entropy)(*batch)


@check
def nadam_resumes(case):
    model, optimizer = train(case, case.mlp(), mx.optimizer.Nadam(learning_rate=0.1))
    case.strategy.save(f"{case.folder}/nadam", model=model, optimizer=optimizer)
    again, other = case.strategy.prepare(case.mlp(), mx.optimizer.Nadam(learning_rate=0.1))
    case.strategy.load(f"{case.folder}/nadam", model=again, optimizer=other)
    batch = [case.backend.from_numpy(each) for each in reference.data(4)]
    for each in ((model, optimizer), (again, other)):
        case.strategy.train_step(*each, cross_entropy)(*batch)
    close(case.parameters(again), case.parameters(model), tolerance=0)


@check
def trainer_is_ours_after_prepare(case):
    model = case.mlp()
    trainer = mx.gluon.Trainer(model.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore="dist_sync")
    model, trainer = train(case, model, trainer)
    with refused(StateError, "train_step"):
        trainer.step(4)
    with refused(StateError, "strategy.save"):
        trainer.save_states(f"{case.folder}/states")
    with refused(StateError, "strategy.load"):
        trainer.load_states(f"{case.folder}/states")
    with refused(StateError, "already"):
        case.strategy.prepare(model, SGD(0.1))
    used = case.mlp()
    trainer = mx.gluon.Trainer(used.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=None)
    trainer._init_kvstore()
    with refused(StateError, "first"):
        case.strategy.prepare(used, trainer)
    with refused(UsageError, "does not hold"):
        half = case.mlp()
        case.strategy.prepare(half, mx.gluon.Trainer(half[0].collect_params(), "sgd", {"learning_rate": 0.1}))


@check
def trainers_of_ones_own_are_refused(case):
    """One that was made before prepare and not given to it, one made afterwards, and the optimizer's own update."""
    model = case.mlp()
    early = mx.gluon.Trainer(model.collect_params(), "sgd", kvstore=None)
    model, optimizer = train(case, model, mx.optimizer.SGD(learning_rate=0.1))
    late = mx.gluon.Trainer(model.collect_params(), "sgd", kvstore=None)
    for trainer in (early, late):
        for call in (trainer.step, trainer.update):
            with refused(StateError, "strategy.step"):
                call(1)
    weight, gradient = model[0].weight.data(), model[0].weight.grad()
    with refused(StateError, "strategy.step"):
        mx.optimizer.get_updater(optimizer)(0, gradient, weight)


@check
def rate_that_is_zero_for_a_while(case):
    """A warm-up from 0: the velocity grows while the parameters stand still."""
    for nesterov in (False, True):
        spec = SGD(lambda update: 0.3 * (update >= 2), momentum=0.9, nesterov=nesterov)
        model, _ = case.train(spec, samples=40)
        close(case.parameters(model), case.train_serially(spec, 40)[0].parameters, tolerance=4e-6)
        halved = case.mlp()
        for each in halved.collect_params().values():
            each.lr_mult = 0.5
        double = SGD(lambda update: 0.6 * (update >= 2), momentum=0.9, nesterov=nesterov)
        train(case, halved, double, epochs=2)
        close(case.parameters(halved), case.parameters(model), tolerance=4e-6)


@check
def gradients_are_whole_while_the_rate_is_zero(case):
    """No parameter moves, so a server has nothing to wait for, and yet may not let go of what it was sent."""
    model = nn.HybridSequential()
    for _ in range(6):
        model.add(nn.Dense(300, in_units=300, use_bias=False))
    model.initialize(mx.init.Zero())
    model, optimizer = case.strategy.prepare(model, SGD(lambda update: float(update >= 30), momentum=0.5))
    parameters = list(model.collect_params().values())
    slope = case.strategy.train_step(model, optimizer, lambda _, x: sum(p.data().sum() for p in parameters) * x.mean())
    for _ in range(31):
        slope(mx.nd.array([1.0 + case.rank]))
    velocity = sum(0.5**n for n in range(31)) * (1 + case.size) / 2
    close(case.parameters(model), [np.full((300, 300), -velocity)] * 6)


@check
def momentum_that_is_new(case):
    """A checkpoint from before it begins with none."""
    model, optimizer = train(case, case.mlp(), SGD(0.1))
    case.strategy.save(f"{case.folder}/without", model=model, optimizer=optimizer)
    again, other = case.strategy.prepare(case.mlp(), SGD(0.1, momentum=0.9))
    case.strategy.load(f"{case.folder}/without", model=again, optimizer=other)
    batch = [case.backend.from_numpy(each) for each in reference.data(4)]
    for each in ((model, optimizer), (again, other)):
        case.strategy.train_step(*each, cross_entropy)(*batch)
    close(case.parameters(again), case.parameters(model))  # the first velocity is the gradient


@check
def rate_set_by_hand(case):
    """As one would in MXNet; on servers too, where MXNet itself never hears of it."""
    model, optimizer = case.strategy.prepare(case.mlp(), SGD(0.5))
    step = case.strategy.train_step(model, optimizer, cross_entropy)
    x, y = reference.data(40)
    loader = case.strategy.loader((x, y), per_device_batch=4, shuffle=True, seed=3)
    for number, (a, b) in enumerate(loader):
        optimizer.set_learning_rate(0.5 / (1 + number))
        step(a, b)
    spec = SGD(lambda update: 0.5 / (1 + update))
    close(case.parameters(model), case.train_serially(spec, 40, epochs=1)[0].parameters)


@check
def rate_set_by_hand_comes_back(case):
    """With an optimizer of MXNet's; a spec says its rate itself."""
    model, optimizer = case.strategy.prepare(case.mlp(), mx.optimizer.create("nag", learning_rate=0.5))
    optimizer.set_learning_rate(0.01)
    case.strategy.save(f"{case.folder}/rate", model=model, optimizer=optimizer)
    model, optimizer = case.strategy.prepare(case.mlp(), mx.optimizer.create("nag", learning_rate=0.5))
    case.strategy.load(f"{case.folder}/rate", model=model, optimizer=optimizer)
    assert optimizer.learning_rate == 0.01


@check
def factors_of_parameters(case):
    """lr_mult 0 freezes, wd_mult 0 spares."""
    model = case.mlp()
    model[0].bias.lr_mult = 0.0
    before = case.parameters(model)[1]
    after = case.parameters(train(case, model, SGD(0.5, momentum=0.9, weight_decay=0.1))[0])
    assert (after[1] == before).all()
    assert (after[0] != reference.weights()[0]).any()


@check
def norms_of_parts_are_refused(case):
    """On two servers."""
    for kind in ("lamb", "lars"):
        with refused(UnsupportedOperation, "one server"):
            case.strategy.prepare(case.mlp(), mx.optimizer.create(kind, learning_rate=0.1))

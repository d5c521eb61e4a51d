"""Further checks for real ranks with MXNet: what a loop does to parameters and gradients between and inside the steps.
The step is still exact, or it is refused."""

from contextlib import suppress

import mxnet as mx
import numpy as np
from mxnet.gluon import nn

from unidist import SGD, Adam
from unidist.errors import StateError
from unidist.testing import reference
from unidist.testing.case import check, close, refused
from unidist.testing.recorded import Recorded, own_rows
from unidist_mxnet.zoo import cross_entropy, native_backward


@check
def gradients_made_anew_between_steps(case):
    """Gluon makes other arrays, and the weight of the batch has to travel with these."""

    def grad_req_and_back(model):
        for kind in ("add", "write"):
            model.collect_params().setattr("grad_req", kind)

    for disturb in (
        lambda model: model.cast("float32"),
        lambda model: model.collect_params().reset_ctx(model[0].weight.list_ctx()),
        grad_req_and_back,
        lambda model: model.collect_params().setattr("grad_req", "add"),
    ):
        for accumulate in (1, 2):
            train = Recorded(case, accumulate=accumulate)
            for number in range(6):
                train(*own_rows(case, number))
                if number == 1:
                    disturb(train.model)
            train.is_serial()


@check
def parameters_of_two_models(case):
    """The second is prepared in the middle of the training of the first, to accumulate."""
    train = Recorded(case)
    train(*own_rows(case, 0))
    outer = nn.HybridSequential()
    outer.add(train.model)
    kept = case.strategy.prepare(outer, SGD(0.5), accumulate=2)
    for number in (1, 2):
        train(*own_rows(case, number))
    train.is_serial()
    assert kept[0] is outer


@check
def backward_before_prepare_of_a_static_graph(case):
    """Such a graph goes on writing to the arrays of its first backward."""
    for accumulate in (1, 2):
        net = case.mlp()
        net.hybridize(static_alloc=True, static_shape=True)
        x, y = (case.backend.from_numpy(each) for each in reference.data(4 * case.backend.devices, seed=9 + case.rank))
        if case.backend.devices == 1:
            native_backward(net, x, y)
        model, optimizer = case.strategy.prepare(net, SGD(0.5), accumulate=accumulate)
        step = case.strategy.train_step(model, optimizer, cross_entropy)
        serial = reference.Serial(reference.weights(), SGD(0.5))
        everyone = [reference.data(4 * case.backend.devices, seed=9 + rank) for rank in range(case.size)]
        for _ in range(2):
            for _ in range(accumulate):
                step(x, y)
            serial.step(*(np.concatenate(each) for each in zip(*everyone, strict=True)))
        case.close_to_serial(model, serial)


@check
def weights_of_very_different_size(case):
    """The gradients are divided by their mean, whatever it is."""
    if case.backend.devices > 1:
        return
    x, y = reference.data(4 * case.size)
    own = [case.backend.from_numpy(each[4 * case.rank : 4 * case.rank + 4]) for each in (x, y)]
    for spec, native in (
        (SGD(0.1), lambda: mx.optimizer.SGD(learning_rate=0.1)),
        (SGD(0.1, momentum=0.9, nesterov=True), None),
        (Adam(0.01), None),
    ):
        model, optimizer = case.strategy.prepare(case.mlp(), native() if native else spec)
        step = case.strategy.train_step(model, optimizer, cross_entropy)
        serial = reference.Serial(reference.weights(), spec)
        for weight in (1, 5000, 3, 10**8):
            step(*own, weight=weight)
            serial.step(x, y)
        close(case.parameters(model), serial.parameters, tolerance=5e-6)


def alone(case):
    """With another model prepared, a step would begin by forgetting whatever it finds."""
    case.strategy._trainer.prepared.clear()


def first_layer_backward(model, x):
    with mx.autograd.record():
        loss = (model[0](x) ** 2).mean()
    loss.backward()


@check
def backward_of_ones_own_with_one_model(case):
    """Before a group, after each of its micro-batches, and before its end; with whatever grad_req."""
    for accumulate in (1, 2, 3):
        for grad_req in ("write", "add"):
            for places in ("before", "inside", "everywhere"):
                alone(case)
                train = Recorded(case, accumulate=accumulate)
                train.model.collect_params().setattr("grad_req", grad_req)
                for number in range(2 * accumulate):
                    x, y = own_rows(case, number)
                    if places == "everywhere" or (number % accumulate == 0) == (places == "before"):
                        first_layer_backward(train.model, x)
                        native_backward(train.model, x, y)
                    train(x, y)
                train.is_serial()


@check
def backward_of_ones_own_through_a_layer_that_the_loss_leaves_out(case):
    """It does not move."""
    for accumulate in (1, 2):
        alone(case)
        model, optimizer = case.strategy.prepare(case.mlp(), SGD(0.5), accumulate=accumulate)
        step = case.strategy.train_step(model, optimizer, lambda m, h, y: cross_entropy(m[2], h, y))
        before = case.parameters(model)
        for number in range(2 * accumulate):
            x, y = own_rows(case, number)
            hidden = model[0](x).tanh()
            first_layer_backward(model, x)
            step(hidden, y)
        after = case.parameters(model)
        close(after[:2], before[:2], tolerance=0)
        assert any((a != b).any() for a, b in zip(after[2:], before[2:], strict=True)), "not trained"


@check
def flush_after_a_backward_of_ones_own(case):
    alone(case)
    train = Recorded(case, accumulate=4)
    for number in range(3):
        x, y = own_rows(case, number)
        train(x, y)
        native_backward(train.model, x, y)
    case.strategy.flush(train.model, train.optimizer)
    train.is_serial([3])


@check
def gradients_clipped_by_hand(case):
    """Where nothing is left to be done to them they are the step's; else this is refused."""
    if case.backend.devices > 1:
        return
    for even in (True, False):
        for early in (False, True):  # whether the arrays were asked for long ago
            serial = reference.Serial(reference.weights(), SGD(0.5))
            model, optimizer = case.strategy.prepare(case.mlp(), SGD(0.5))
            held = [each.grad() for each in model.collect_params().values()]
            for number in range(2):
                parts = [
                    [each[: 4 if even else 2 + rank] for each in reference.data(8, seed=rank + 10 * number)]
                    for rank in range(case.size)
                ]
                x, y = (case.backend.from_numpy(each.copy()) for each in parts[case.rank])
                with case.strategy.forward(model):
                    loss = cross_entropy(model, x, y)
                case.strategy.backward(loss)
                gradients = held if early else [each.grad() for each in model.collect_params().values()]
                mx.gluon.utils.clip_global_norm(gradients, 0.1)
                if not even or getattr(case.backend.options, "update_on", "worker") == "server":
                    with refused(StateError, "clip_norm"):
                        case.strategy.step(optimizer)
                    break
                case.strategy.step(optimizer)
                serial.step(*(np.concatenate(each) for each in zip(*parts, strict=True)), 0.1)
            else:
                close(case.parameters(model), serial.parameters)


@check
def gradients_that_are_looked_at(case):
    """Between backward and step, and changed by nobody."""
    train = Recorded(case)
    for number in range(3):
        x, y = own_rows(case, number)
        train.remember(x, y)
        with case.strategy.forward(train.model):
            loss = cross_entropy(train.model, x, y)
        case.strategy.backward(loss)
        assert all(np.isfinite(each.grad().asnumpy()).all() for each in train.model.collect_params().values())
        case.strategy.step(train.optimizer)
    if case.backend.devices == 1:
        train.is_serial()


@check
def gradients_kept_while_another_model_is_trained(case):
    """In the middle of a group; not where the two have parameters in common."""
    train = Recorded(case, accumulate=2)
    other, _ = case.strategy.prepare(case.mlp(2), SGD(0.5))
    for number in range(4):
        x, y = own_rows(case, number)
        if number % 2:
            with case.backend.keep_gradients(train.model, other):
                native_backward(train.model, x, y)
        train(x, y)
        assert all(np.isfinite(each.grad().asnumpy()).all() for each in train.model.collect_params().values())
    train.is_serial()
    outer = nn.HybridSequential()
    outer.add(train.model)
    if getattr(case.backend.options, "update_on", "worker") == "server":
        return
    outer, _ = case.strategy.prepare(outer, SGD(0.5))
    with refused(StateError, "parameter"), case.backend.keep_gradients(train.model, outer):
        pass


@check
def values_set_between_steps(case):
    """As a critic's weights are clipped: the next step goes on from them, or is refused where servers hold others."""
    on_servers = getattr(case.backend.options, "update_on", "worker") == "server"

    def by_set_data(parameter):
        parameter.set_data(parameter.data().clip(-0.2, 0.2))

    def by_initialize(parameter):
        parameter.initialize(mx.init.One(), ctx=parameter.list_ctx(), force_reinit=True)

    for change in (by_set_data, by_initialize):
        model, optimizer = case.strategy.prepare(case.mlp(), SGD(0.5))
        case.strategy.save(f"{case.folder}/before", model=model)
        step = case.strategy.train_step(model, optimizer, cross_entropy)
        everyone = [reference.data(4 * case.backend.devices, seed=rank) for rank in range(case.size)]
        batch = [case.backend.from_numpy(each) for each in everyone[case.rank]]
        step(*batch)
        for each in model.collect_params().values():
            change(each)
        serial = reference.Serial(case.parameters(model), SGD(0.5))
        if on_servers:
            with refused(StateError, "servers"):
                step(*batch)
            case.strategy.load(f"{case.folder}/before", model=model)
            serial = reference.Serial(reference.weights(), SGD(0.5))
        step(*batch)
        serial.step(*(np.concatenate(each) for each in zip(*everyone, strict=True)))
        case.close_to_serial(model, serial)


@check
def arrays_made_anew_while_gradients_travel(case):
    """What is sent of the new arrays does not overtake what is still sent of the old ones, under the same keys."""
    net = nn.HybridSequential()
    net.add(nn.Dense(256, in_units=64), nn.Dense(1, in_units=256))  # small ones were never seen to be overtaken
    net.initialize()
    model, optimizer = case.strategy.prepare(net, SGD(0.1))
    step = case.strategy.train_step(model, optimizer, lambda model, x, y: ((model(x) - y) ** 2).mean())
    numbers = np.random.default_rng(case.rank)
    batch = [mx.nd.array(numbers.random((8, 64))), mx.nd.array(numbers.random((8, 1)))]

    def after(steps):
        for _ in range(steps):
            for each in model.collect_params().values():
                each.initialize(mx.init.Constant(0.01), ctx=each.list_ctx(), force_reinit=True)
            step(*batch)
        return case.parameters(model)

    alone = after(1)
    for _ in range(30):
        close(after(3), alone)


@check
def wait_for_the_queue_that_is_interrupted(case):
    """As by Ctrl-C, which mostly comes there: the step is made, or it is not, and the loop can go on."""
    waits, wait_for = [], case.backend.pace._wait_for

    def interrupted(losses):
        waits.append(len(losses))
        if len(waits) == 2:
            raise KeyboardInterrupt
        wait_for(losses)

    case.backend.pace._wait_for = interrupted
    model, optimizer = case.strategy.prepare(case.mlp(), SGD(0.1))
    step = case.strategy.train_step(model, optimizer, cross_entropy)
    everyone = [reference.data(4 * case.backend.devices, seed=rank) for rank in range(case.size)]
    batch = [case.backend.from_numpy(each) for each in everyone[case.rank]]
    serial, made = reference.Serial(reference.weights(), SGD(0.1)), 0
    try:
        while made < 300:  # at most 64 are in the queue
            with suppress(KeyboardInterrupt):
                step(*batch)
                serial.step(*(np.concatenate(each) for each in zip(*everyone, strict=True)))
                made += 1
    finally:
        case.backend.pace._wait_for = wait_for
    assert len(waits) > 2
    case.close_to_serial(model, serial)
    assert case.strategy._trainer.prepared_as(model, optimizer).schedule.updates == made


@check
def trainers_after_the_end(case):
    """When the Strategy is closed, the model, its optimizer and a Trainer are the user's again."""
    net = case.mlp()
    given = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5}, kvstore=None)
    model, _ = case.strategy.prepare(net, given, accumulate=2)
    late = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5}, kvstore=None)
    for trainer in (given, late):
        with refused(StateError, "prepare"):
            trainer.step(1)
    before = case.backend._trained
    case.backend._trained = {model: before[model]}
    case.backend.release()  # as close() does
    case.backend._trained = before
    x, y = (case.backend.from_numpy(each) for each in reference.data(4))
    late = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5}, kvstore=None)
    serial = reference.Serial(case.parameters(model), SGD(0.5))
    for trainer in (late, given, late):
        native_backward(net, x, y)
        trainer.step(1)
        serial.step(*reference.data(4))
    close([each.data().asnumpy() for each in net.collect_params().values()], serial.parameters)

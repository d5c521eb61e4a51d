"""What only MXNet has, as further checks for real ranks. It is named as their zoo, so that they import it."""

import mxnet as mx
import mxnet_exact_checks  # noqa: F401  # registers them
import mxnet_io_checks  # noqa: F401  # registers them
import mxnet_optimizer_checks  # noqa: F401  # registers them
import mxnet_shape_checks  # noqa: F401  # registers them
import mxnet_state_checks  # noqa: F401  # registers them
import numpy as np
from mxnet.gluon import nn
from mxnet_check_support import train

from unidist import SGD
from unidist.errors import RanksDisagree, StateError, UsageError
from unidist.testing import reference
from unidist.testing.case import check, close, refused
from unidist.training.pace import MOST
from unidist_mxnet.zoo import *  # noqa: F403
from unidist_mxnet.zoo import cross_entropy, set_trained, with_buffers


@check
def averages_by_hand_wait_for_each_other(case):
    """Parameters that are equal stay so, and gradients that take a while become their mean."""
    for order in (("gradients", "parameters"), ("parameters", "gradients")):
        model = nn.HybridSequential()
        model.add(*(nn.Dense(400, in_units=400, use_bias=False) for _ in range(4)))
        model.initialize(mx.init.Constant(0.01))
        model, optimizer = case.strategy.prepare(model, SGD(1.0), sync_every=0)
        with case.strategy.forward(model):
            loss = model(mx.nd.ones((200, 400)) * (1 + case.rank)).mean()
        case.strategy.backward(loss)
        for what in order:
            getattr(case.strategy, f"average_{what}")(model)
        close(case.parameters(model), [np.full((400, 400), 0.01)] * 4)
        gradients = [each.grad().asnumpy() for each in model.collect_params().values()]
        close(gradients, [np.full((400, 400), 4.0**3 / 400 * (1 + case.size) / 2)] * 4, tolerance=1e-4)
        case.strategy.step(optimizer)


@check
def arrays_of_mx_np(case):
    """Models of them train and are loaded as those of mx.nd."""
    loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    how = {"accumulate": 2, "clip_norm": 0.5, "loss_fn": lambda model, x, y: loss(model(x), y).mean()}
    spec = SGD(0.3, momentum=0.9)
    expected = case.parameters(train(case, case.mlp(), spec, **how)[0])
    mx.npx.set_np()
    try:
        model, optimizer = train(case, case.mlp(), spec, **how)
        case.strategy.save(f"{case.folder}/np", model=model, optimizer=optimizer)
        again, optimizer = case.strategy.prepare(case.mlp(), spec)
        case.strategy.load(f"{case.folder}/np", model=again, optimizer=optimizer)
    finally:
        mx.npx.reset_np()
    assert all(isinstance(each.data(), mx.np.ndarray) for each in again.collect_params().values())
    close(case.parameters(model), expected, tolerance=0)
    close(case.parameters(again), expected, tolerance=0)


@check
def frozen_or_unfrozen_too_late(case):
    """Which parameters are exchanged is settled by prepare."""
    for before, after in (("write", "null"), ("null", "write")):
        model = case.mlp()
        model[0].bias.grad_req = before
        model, optimizer = case.strategy.prepare(model, SGD(0.1))
        step = case.strategy.train_step(model, optimizer, cross_entropy)
        batch = [case.backend.from_numpy(each) for each in reference.data(4)]
        step(*batch)
        model[0].bias.grad_req = after
        with refused(StateError, "after prepare()", "frozen"):
            step(*batch)


@check
def frozen_for_a_while(case):
    """As the other model's step in a GAN does: Gluon makes new arrays of gradients, and the step uses them, also
    in the middle of a group."""
    for accumulate in (1, 2):
        model, optimizer = case.strategy.prepare(case.mlp(), SGD(0.5), accumulate=accumulate)
        step = case.strategy.train_step(model, optimizer, cross_entropy)
        for x, y in case.strategy.loader(reference.data(16 * case.size), per_device_batch=4, shuffle=True, seed=3):
            set_trained(model, False)
            set_trained(model, True)
            step(x, y)
        expected, _ = case.train_serially(SGD(0.5), 16 * case.size, epochs=1, accumulate=accumulate)
        case.close_to_serial(model, expected)


@check
def gradient_of_a_parameter_that_was_not_used(case):
    """It is zero, not what an earlier step left there."""
    model, optimizer = case.strategy.prepare(case.mlp(), SGD(0.5))
    with_all = case.strategy.train_step(model, optimizer, cross_entropy)
    head = case.strategy.train_step(model, optimizer, lambda m, x, y: (m[0](x) ** 2).mean())
    x, y = (case.backend.from_numpy(each) for each in reference.data(4 * case.backend.devices))
    with_all(x, y)
    last = case.parameters(model)[2:]
    head(x, y)
    close(case.parameters(model)[2:], last, tolerance=0)


@check
def models_that_cannot_be_trained_are_refused(case):
    empty = nn.Dense(3, in_units=2)
    with refused(UsageError, "initialize"):
        case.strategy.prepare(empty, SGD(0.1))
    sparse = nn.Embedding(5, 2, sparse_grad=True)
    sparse.initialize()
    with refused(UsageError, "sparse"):
        case.strategy.prepare(sparse, SGD(0.1))
    double = nn.Dense(3, in_units=2, dtype="float64")
    double.initialize()
    with refused(UsageError, "float32"):
        case.strategy.prepare(double, SGD(0.1))


@check
def large_collectives(case):
    """Beyond what fits into one message of the control plane."""
    wide = np.arange(3_000_000, dtype=np.float64) + case.rank
    total = case.strategy.all_reduce(wide, "sum")
    assert (total == sum(np.arange(3_000_000) + rank for rank in range(case.size))).all()
    assert (case.strategy.broadcast(wide, case.size - 1) == np.arange(3_000_000) + case.size - 1).all()


@check
def values_loaded_into_a_prepared_model(case):
    """Also when servers hold them: the next step starts from there."""
    model, optimizer = case.strategy.prepare(case.mlp(seed=5), SGD(0.5))
    step = case.strategy.train_step(model, optimizer, cross_entropy)
    case.backend.load_state(model, dict(zip(case.backend.state(model), reference.weights(1), strict=True)))
    loader = case.strategy.loader(reference.data(40), per_device_batch=4, shuffle=True, seed=3)
    for x, y in loader:
        step(x, y)
    case.close_to_serial(model, case.train_serially(SGD(0.5), 40, epochs=1)[0])


@check
def ranks_that_disagree_over_horovod(case):
    """Below the Strategy, which would see it first here: it does so only if UNIDIST_DEBUG is set."""
    with refused(RanksDisagree, "all_reduce sum: Mismatched"):
        case.backend.all_reduce(mx.nd.ones(2 + case.rank), "sum")
    assert case.strategy.all_reduce(1, "sum") == case.size


@check
def collectives_in_pieces_over_horovod(case):
    """As they go beyond 1 GiB; here beyond 1000 bytes."""
    from unidist_horovod import meeting

    most, meeting.MOST_BYTES = meeting.MOST_BYTES, 1000
    wide = np.arange(1001, dtype=np.float64) + case.rank
    gathered, last = case.strategy.all_gather(wide), case.strategy.broadcast(wide, case.size - 1)
    meeting.MOST_BYTES = most
    assert [each[1000] for each in gathered] == [1000 + rank for rank in range(case.size)]
    assert all((np.diff(each) == 1).all() for each in (*gathered, last))
    assert last[0] == case.size - 1


@check
def steps_that_nobody_waits_for_are_not_queued(case):
    """Three thousand of them take no more memory than two hundred, which fill the queue."""
    model, optimizer = case.strategy.prepare(case.mlp(), SGD(0.01))
    step = case.strategy.train_step(model, optimizer, cross_entropy)
    x, y = reference.data(4)
    for number in range(3000):
        step(case.backend.from_numpy(x), case.backend.from_numpy(y))
        if number == 200:
            mx.nd.waitall()
            before = resident()
        assert len(case.backend.pace) <= MOST
    assert resident() - before < 16 * 2**20


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@check
def one_row_for_batch_normalisation(case):
    """It becomes zero, as MXNet has it; nothing dies of it, and nothing becomes NaN."""
    model, optimizer = case.strategy.prepare(with_buffers(), SGD(0.1))
    step = case.strategy.train_step(model, optimizer, cross_entropy)
    for x, y in case.strategy.loader(reference.data(5 * case.size), per_device_batch=4):
        step(x, y)
    with case.strategy.evaluate(model):
        assert all(np.isfinite(each).all() for each in case.parameters(model))

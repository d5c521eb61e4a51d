"""Further checks of MXNet, where workers do not wait for each other or gradients are compressed."""

import mxnet as mx
import mxnet_checks  # noqa: F401  # registers them
import numpy as np
from mxnet.gluon import nn
from mxnet_check_support import train
from mxnet_io_checks import of_images, record_file

from unidist import SGD
from unidist.control import connect_from_env
from unidist.errors import UnsupportedOperation
from unidist.testing import reference
from unidist.testing.case import check, close, refused
from unidist_mxnet.zoo import *  # noqa: F403
from unidist_mxnet.zoo import cross_entropy


@check
def velocity_in_dist_async_while_the_rate_is_zero(case):
    """With gradient g it comes to stand at 10 g (momentum 0.9), so each update after that moves by as much."""
    model = nn.HybridSequential()
    model.add(*(nn.Dense(5, in_units=5) for _ in range(6)))
    model.initialize(mx.init.Zero())
    model, optimizer = case.strategy.prepare(model, SGD(lambda update: float(update >= 250), momentum=0.9))
    parameters = list(model.collect_params().values())
    gradients = range(1, 1 + len(parameters))
    slope = case.strategy.train_step(
        model, optimizer, lambda _, x: sum(g * p.data().sum() for g, p in zip(gradients, parameters, strict=True)) * x
    )
    for _ in range(251):
        slope(mx.nd.ones((1,)))
    with case.strategy.evaluate(model):
        updates = [value / (-10 * g) for g, value in zip(gradients, case.parameters(model), strict=True)]
    assert min(each.min() for each in updates) > 0.9, updates
    close(updates, [np.round(each) for each in updates], tolerance=5e-3)  # up to 251 sums, each rounded to float32


@check
def evaluation_inside_a_group_of_dist_async(case):
    """Gradients that wait for the rest of their group are not lost over it."""
    model = nn.Dense(1, in_units=3, use_bias=False)
    model.initialize(mx.init.Constant(100.0))
    model, optimizer = case.strategy.prepare(model, SGD(1.0), accumulate=2)
    step = case.strategy.train_step(model, optimizer, lambda m, x: m(x).sum())
    for number in range(4):
        step(mx.nd.ones((1, 3)))
        if number == 2:
            with case.strategy.evaluate(model):
                pass
    with case.strategy.evaluate(model):
        close(case.parameters(model), [np.full((1, 3), 100.0 - 2 * case.size)])


@check
def slow_worker_holds_nobody_back(case):
    """Rank 0 makes twenty steps while the last rank has made none."""
    model, optimizer = case.strategy.prepare(case.mlp(), SGD(0.05))
    step = case.strategy.train_step(model, optimizer, cross_entropy)
    x, y = (case.backend.from_numpy(each) for each in reference.data(4))
    control, last = connect_from_env(), case.size - 1
    if case.rank == last:
        assert control.get("steps of rank 0", wait=120) == b"20"
        step(x, y).wait_to_read()
    else:
        for _ in range(20):
            step(x, y).wait_to_read()
        if case.rank == 0:
            control.put("steps of rank 0", b"20")
    case.strategy.barrier()


@check
def each_gradient_is_applied_by_itself(case):
    """One rank after the other: together they make the serial path, each step on one rank's own batch."""
    spec = SGD(lambda update: 0.5 / (1 + update), momentum=0.9)
    model, optimizer = case.strategy.prepare(case.mlp(), spec)
    step = case.strategy.train_step(model, optimizer, cross_entropy)
    x, y = reference.data(4 * case.size)
    serial = reference.Serial(reference.weights(), SGD(0.5, momentum=0.9))
    for rank in range(case.size):
        rows = slice(4 * rank, 4 * rank + 4)
        with case.strategy.evaluate(model):  # brings everybody what the servers hold
            pass
        if case.rank == rank:
            step(case.backend.from_numpy(x[rows]), case.backend.from_numpy(y[rows])).wait_to_read()
        serial.step(x[rows], y[rows])
    with case.strategy.evaluate(model):
        close(case.parameters(model), serial.parameters)


@check
def rate_does_not_overtake_gradients(case):
    """One rank goes on without waiting for its answers; each of its gradients is applied at its own rate."""
    spec = SGD(lambda update: 0.5 * (update == 0))
    model, optimizer = case.strategy.prepare(case.mlp(), spec)
    step = case.strategy.train_step(model, optimizer, cross_entropy)
    x, y = reference.data(40)
    parts = [slice(first, first + 4) for first in range(0, 40, 4)]
    batches = [(case.backend.from_numpy(x[rows]), case.backend.from_numpy(y[rows])) for rows in parts]
    if case.rank == 0:
        for batch in batches:
            step(*batch)
    serial = reference.Serial(reference.weights(), spec)
    for rows in parts:
        serial.step(x[rows], y[rows])
    with case.strategy.evaluate(model):
        close(case.parameters(model), serial.parameters)


@check
def flush_in_dist_async(case):
    """Of one rank alone, and once."""
    model, optimizer = case.strategy.prepare(case.mlp(), SGD(0.1), accumulate=4)
    step = case.strategy.train_step(model, optimizer, cross_entropy)
    x, y = reference.data(4)
    if case.rank == 0:
        step(case.backend.from_numpy(x), case.backend.from_numpy(y))
        case.strategy.flush(model, optimizer)
    serial = reference.Serial(reference.weights(), SGD(0.1))
    serial.step(x, y)
    with case.strategy.evaluate(model):
        close(case.parameters(model), serial.parameters)


@check
def checkpoint_of_dist_async(case):
    """It holds what the servers hold, although rank 0, which writes it, has made no step."""
    model, optimizer = case.strategy.prepare(case.mlp(), SGD(0.1))
    step = case.strategy.train_step(model, optimizer, cross_entropy)
    x, y = reference.data(4)
    if case.rank == 1:
        step(case.backend.from_numpy(x), case.backend.from_numpy(y))
        mx.nd.waitall()
    case.strategy.barrier()
    case.strategy.save(f"{case.folder}/async", model=model)
    other = case.strategy.prepare(case.mlp(seed=5))
    case.strategy.load(f"{case.folder}/async", model=other)
    serial = reference.Serial(reference.weights(), SGD(0.1))
    serial.step(x, y)
    close(case.parameters(other), serial.parameters)


@check
def staleness_is_counted(case):
    model, _ = train(case, case.mlp(), SGD(0.05), epochs=4)
    with case.strategy.evaluate(model):
        pass
    counted = case.backend._trained[model].staleness
    counted.settle()
    assert counted.updates > 0
    assert 0 <= counted.total <= counted.updates * counted.worst


@check
def io_iterators_end_each_on_its_own(case):
    make, parts, _ = record_file(case)
    model, optimizer = case.strategy.prepare(case.mlp(), SGD(0.05))
    step = case.strategy.train_step(model, optimizer, of_images)
    assert len([step(*batch) for batch in case.strategy.loader(make)]) == -(-len(parts[case.rank]) // 4)


# -- compression -----------------------------------------------------------------------------------------------


@check
def compressed_to_two_bits(case):
    """Every element moves by a whole number of thresholds from each rank, and what is kept back is not lost."""
    model, optimizer = case.strategy.prepare(case.mlp(), SGD(1.0))
    step = case.strategy.train_step(model, optimizer, cross_entropy)
    threshold = case.backend.options.compression_threshold
    x, y = (case.backend.from_numpy(each) for each in reference.data(4))
    for _ in range(3):
        before = case.parameters(model)
        step(x, y)
        for now, then in zip(case.parameters(model), before, strict=True):
            units = (then - now) / threshold
            close([units], [np.round(units)], tolerance=1e-3)
            assert np.abs(units).max() <= case.size + 1e-3
    for theirs in case.strategy.all_gather(case.parameters(model)):
        close(theirs, case.parameters(model), tolerance=0)


@check
def compressed_in_dist_async(case):
    """Whoever comes first: what the servers add up are whole thresholds."""
    model, _ = train(case, case.mlp(), SGD(1.0))
    with case.strategy.evaluate(model):
        moved = [now - then for now, then in zip(case.parameters(model), reference.weights(), strict=True)]
    units = np.concatenate([each.ravel() for each in moved]) / case.backend.options.compression_threshold
    assert np.abs(units).max() > 0.5
    close([units], [np.round(units)], tolerance=1e-3)


@check
def values_that_would_be_compressed_are_refused(case):
    model, _ = case.strategy.prepare(case.mlp(seed=5), SGD(0.5))
    close(case.parameters(model), reference.weights(5), tolerance=0)
    with refused(UnsupportedOperation, "before prepare"):
        case.backend.load_state(model, dict(zip(case.backend.state(model), reference.weights(1), strict=True)))

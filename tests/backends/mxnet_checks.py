"""What only MXNet has, as further checks for real ranks. It is named as their zoo, so that they import it."""

import struct
import zlib
from functools import partial

import mxnet as mx
import numpy as np
from mxnet.gluon import nn
from mxnet_exact_checks import *  # noqa: F403
from mxnet_state_checks import *  # noqa: F403

from unidist import SGD, Adam
from unidist.errors import CheckpointError, RanksDisagree, StateError, UnsupportedOperation, UsageError
from unidist.testing import reference
from unidist.testing.case import check, close, refused
from unidist.training.pace import MOST
from unidist_mxnet.zoo import *  # noqa: F403
from unidist_mxnet.zoo import cross_entropy, set_trained, with_buffers


def train(case, model, optimizer, samples=40, epochs=1, loss_fn=cross_entropy, clip_norm=None, **how):
    model, optimizer = case.strategy.prepare(model, optimizer, **how)
    step = case.strategy.train_step(model, optimizer, loss_fn, clip_norm=clip_norm)
    loader = case.strategy.loader(reference.data(samples), per_device_batch=4, shuffle=True, seed=3)
    for _ in range(epochs):
        for x, y in loader:
            step(x, y)
    return model, optimizer


def undecided(hybrid=True):
    """Its first layer learns its input size from the data."""
    _, hidden, classes = reference.SIZES
    model = nn.HybridSequential()
    model.add(nn.Dense(hidden), nn.Activation("tanh"), nn.Dense(classes))
    model.initialize(mx.init.Normal(0.3))
    if hybrid:
        model.hybridize()
    return model


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
def io_iterators(case):
    """Parts of 19 and 4 records on 2 ranks: every record once in every epoch, each step the serial one on the records
    of all ranks, also when one has none left, also after a resume."""
    make, parts, x = record_file(case)
    model, optimizer = case.strategy.prepare(case.mlp(), SGD(0.5))
    step = case.strategy.train_step(model, optimizer, of_images)
    loader, serial = case.strategy.loader(make), reference.Serial(reference.weights(), SGD(0.5))
    assert str(loader.batch).endswith(f"{4 * case.size} global")
    for _ in range(3):
        for number, (images, labels) in enumerate(loader):
            own = [part[4 * number : 4 * number + 4] for part in parts]
            if own[case.rank]:
                assert labels.asnumpy().tolist() == own[case.rank]
            step(images, labels)
            records = np.concatenate(own).astype(int)
            serial.step(x[records], records % 4)
            if number == 2:  # the second rank has nothing left
                place = loader.state()
        assert number == 4
    case.close_to_serial(model, serial)
    resumed = case.strategy.loader(make)
    resumed.load_state(place)
    rest = [labels.asnumpy().tolist() for _, labels in resumed]
    assert rest == [parts[0][12:16], parts[0][16:]] if case.rank == 0 else len(rest) == 2
    with refused(CheckpointError, "seed 1"):
        case.strategy.loader(make, seed=1).load_state(place)


@check
def io_iterators_shuffle_and_augment_anew(case):
    """By (seed, epoch): in every epoch another order and other crops, in two loaders the same."""
    make, parts, _ = record_file(case)
    make = partial(make, shuffle=True, rand_crop=True)
    first, second = case.strategy.loader(make, seed=3), case.strategy.loader(make, seed=3)
    epochs = [[batch for batch in first], [batch for batch in first], [batch for batch in second]]
    orders, images = [], []
    for epoch in epochs:
        labels = np.concatenate([y.asnumpy() for _, y in epoch])[: len(parts[case.rank])].tolist()
        assert sorted(labels) == sorted(parts[case.rank])
        orders.append(labels)
        images.append({y: image for x, ys in epoch for image, y in zip(x.asnumpy(), ys.asnumpy(), strict=True)})
    assert orders[0] == orders[2]
    assert orders[0] != orders[1]
    large = [n for n in parts[case.rank] if n >= 15]  # the others are as small as the crop
    assert all((images[0][n] == images[2][n]).all() for n in large)
    assert not all((images[0][n] == images[1][n]).all() for n in large)


@check
def io_iterators_that_cannot_be_shared_out_are_refused(case):
    x, y = reference.data(8)
    make, _, _ = record_file(case)
    for data, words in [
        (mx.io.NDArrayIter(x, y, batch_size=4), "holds arrays"),
        (make(), "made already"),
        (partial(mx.io.CSVIter, data_csv="x.csv", data_shape=(2,), batch_size=4), "CSVIter cannot"),
        (partial(mx.io.MNISTIter, batch_size=4), "MNISTIter cannot"),
        (partial(make, num_parts=2, part_index=0), "leave num_parts, part_index out"),
        (partial(make, batch_size="4"), "batch_size"),
    ]:
        with refused(UsageError, words):
            case.strategy.loader(data)


def record_file(case):
    """What makes an iterator, the numbers of the records in each part as MXNet cuts it, the features of all records."""
    path = f"{case.folder}/images.rec"
    if case.rank == 0:
        file = mx.recordio.MXRecordIO(path, "w")
        for n in range(23):
            side = 8 if n < 15 else 40  # parts are cut by bytes: the first gets more records
            image = np.random.RandomState(n).randint(0, 255, (side, side, 3)).astype(np.uint8)
            file.write(mx.recordio.pack(mx.recordio.IRHeader(0, n, n, 0), png(image)))
        file.close()
    case.strategy.barrier()
    make = partial(mx.io.ImageRecordIter, path_imgrec=path, data_shape=(3, 8, 8), batch_size=4)
    parts, features = [], np.empty((23, 6))
    for part in range(case.size):
        parts.append([])
        for batch in make(num_parts=case.size, part_index=part, batch_size=1, verbose=False):
            parts[-1].append(int(batch.label[0].asscalar()))
            features[parts[-1][-1]] = batch.data[0][0, 0, 0, :6].asnumpy() / 255
    assert [len(part) for part in parts] == [19, 4]
    return make, parts, features


def of_images(model, images, labels):
    return cross_entropy(model, images[:, 0, 0, :6] / 255, labels % 4)


def png(image):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width, _ = image.shape
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    rows = b"".join(b"\0" + row.tobytes() for row in image)
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@check
def norms_of_parts_are_refused(case):
    """On two servers."""
    for kind in ("lamb", "lars"):
        with refused(UnsupportedOperation, "one server"):
            case.strategy.prepare(case.mlp(), mx.optimizer.create(kind, learning_rate=0.1))


# -- dist_async ------------------------------------------------------------------------------------------------


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


# -- beside the straight road ----------------------------------------------------------------------------------


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

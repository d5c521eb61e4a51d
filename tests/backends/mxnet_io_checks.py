"""Further checks for real ranks with MXNet: iterators of mx.io, which read a part of the records on each rank."""

import struct
import zlib
from functools import partial

import mxnet as mx
import numpy as np

from unidist import SGD
from unidist.errors import CheckpointError, UsageError
from unidist.testing import reference
from unidist.testing.case import check, refused
from unidist_mxnet.zoo import cross_entropy


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

"""Promises 2 and 3: the batch is stated once, and every world size sees the same samples in the same order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from unidist.data.order import permutation
from unidist.errors import UsageError
from unidist.optim import SGD
from unidist.testing import reference
from unidist.testing.case import Case, check, refused


def drawn(case: Case, **how: Any) -> list[list[int]]:
    """The samples of each global batch of one pass, all ranks together: each sample carries its own number."""
    numbers = np.arange(how.pop("samples"))
    loader = case.strategy.loader(numbers, **how)
    return [batch(case, x) for x in loader]


def batch(case: Case, x: Any) -> list[int]:
    samples = case.backend.to_numpy(x)
    padded = np.full(64, -1)
    padded[: len(samples)] = samples
    return [int(n) for part in case.strategy.all_gather(padded) for n in part if n >= 0]


@check
def batch_arithmetic(case: Case) -> None:
    loader = case.strategy.loader(reference.data(64), per_device_batch=2, scale="linear")
    devices = case.backend.devices
    assert loader.batch.per_device == 2
    assert loader.batch.devices == devices
    assert loader.batch.per_worker == 2 * devices
    assert loader.batch.workers == case.size
    assert loader.batch.global_batch == 2 * devices * case.size
    lockstep = case.strategy.capabilities.lockstep is True
    assert loader.batch.lr_scale == devices * (case.size if lockstep else 1)  # the samples of one update
    same = case.strategy.loader(reference.data(64), global_batch=loader.batch.global_batch)
    assert same.batch.per_device == 2
    assert same.batch.lr_scale == 1
    if case.size > 1:
        with refused(UsageError, "does not divide"):
            case.strategy.loader(reference.data(64), global_batch=loader.batch.global_batch + 1)


@check
def order_is_the_same_at_every_world_size(case: Case) -> None:
    """Six samples a step at sizes 1, 2 and 3: the same six, whatever the number of ranks."""
    whole = 6 * case.backend.devices
    got = drawn(case, samples=whole * 3, global_batch=whole, shuffle=True, seed=5)
    order = permutation(whole * 3, 5, 0)
    assert got == [order[i : i + whole].tolist() for i in range(0, whole * 3, whole)]


@check
def every_sample_once_in_an_uneven_pass(case: Case) -> None:
    """21 samples: covering, and disjoint but for the padding of ranks that have nothing left."""
    got = drawn(case, samples=21, per_device_batch=2, shuffle=True, seed=5)
    everything = [n for step in got for n in step]
    assert set(everything) == set(range(21))
    left_over = 21 % (2 * case.backend.devices * case.size)
    assert len(everything) == 21 + (max(0, case.size - left_over) if left_over else 0)


@check
def dropped_and_padded_tails(case: Case) -> None:
    whole = 2 * case.backend.devices * case.size
    assert [len(step) for step in drawn(case, samples=whole * 2 + 1, per_device_batch=2, tail="drop")] == [whole] * 2
    assert [len(step) for step in drawn(case, samples=whole * 2 + 1, per_device_batch=2, tail="pad")] == [whole] * 3
    with refused(UsageError, "drop"):
        case.strategy.loader(np.arange(1), per_device_batch=2, tail="drop")


@check
def each_pass_is_a_new_epoch(case: Case) -> None:
    loader = case.strategy.loader(np.arange(48), per_device_batch=4, shuffle=True, seed=1)
    first, second = ([batch(case, x) for x in loader] for _ in range(2))
    assert first != second
    loader.set_epoch(0)
    assert [batch(case, x) for x in loader] == first
    for _ in loader:
        break  # left early: counts as a pass
    loader_epoch = loader.epoch
    assert loader_epoch == 2


@check
def batches_arrive_ready(case: Case) -> None:
    """Native, float64 as float32, labels int64, other integers as stored; dicts and memory maps too."""
    path = case.folder / "images.npy"
    with case.strategy.main_first():
        if case.rank == 0:
            np.save(path, np.arange(32, dtype=np.float64).reshape(8, 4))
    data = {"x": path, "y": np.arange(8, dtype=np.int16), "z": np.zeros((8, 2), dtype=np.uint8)}
    for got in case.strategy.loader(data, per_device_batch=8):
        assert all(case.backend.is_tensor(answer) for answer in got.values())
        x, y, z = (case.backend.to_numpy(got[name]) for name in "xyz")
        assert (x.dtype, y.dtype, z.dtype) == (np.float32, np.int64, np.uint8)
        assert (x == np.arange(32).reshape(8, 4)[y]).all()
    kept = next(iter(case.strategy.loader(np.zeros((8, 2)), per_device_batch=8, keep_float64=True)))
    assert case.backend.to_numpy(kept).dtype == np.float64


@check
def data_that_is_not_arrays_is_refused(case: Case) -> None:
    for data in ([[1, 2], [3, 4]], (np.zeros(3), np.zeros(4)), np.zeros(0), (), "missing.npy", np.zeros(())):
        with refused(UsageError, "data"):
            case.strategy.loader(data, per_device_batch=1)


@check
def blocks_do_not_change_the_order(case: Case) -> None:
    """A data set of several read-ahead blocks, with and without the reading thread."""
    wide = np.repeat(np.arange(600, dtype=np.float32)[:, None], 3000, axis=1)  # 7 MB
    order = permutation(600, 2, 0)
    for prefetch in (True, False):
        loader = case.strategy.loader(
            wide, global_batch=12 * case.backend.devices, shuffle=True, seed=2, prefetch=prefetch
        )
        got = [case.backend.to_numpy(x[:, 0]).astype(int).tolist() for x in loader]
        share = loader.batch.per_worker
        assert got[:-1] == [
            order[i + case.rank * share :][:share].tolist()
            for i in range(0, 600 - loader.batch.global_batch, loader.batch.global_batch)
        ]


class Numbers:
    """A map-style data set whose samples are their own numbers."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        return np.float32(index)


class Stream:
    """The same without a length."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __iter__(self) -> Iterator[Any]:
        return (np.float32(number) for number in range(self._size))


@check
def data_set_read_by_workers(case: Case) -> None:
    """The same order as arrays, whatever the number of worker processes."""
    case.requires("native_loader")
    for workers in (0, 2):
        for samples in (24, 23):
            expected = drawn(case, samples=samples, per_device_batch=2, shuffle=True, seed=5)
            loader = case.strategy.loader(Numbers(samples), per_device_batch=2, shuffle=True, seed=5, workers=workers)
            batches = list(loader)
            assert [batch(case, x) for x in batches] == expected
            assert case.strategy.gather(batches).tolist() == list(range(samples))


@check
def native_data_loader_is_given_our_order(case: Case) -> None:
    """It keeps its batch size, collation and workers; no batch argument is allowed beside it."""
    case.requires("native_loader")
    for shuffle in (False, True):
        expected = drawn(case, samples=23, per_device_batch=3, shuffle=shuffle)
        native = case.zoo.data_loader(Numbers(23), batch_size=3, shuffle=shuffle)
        loader = case.strategy.loader(native)
        assert loader.batch.per_device == 3
        assert [batch(case, x) for x in loader] == expected
    with refused(UsageError, "per_device_batch"):
        case.strategy.loader(native, per_device_batch=3)


@check
def stream_is_shared_out(case: Case) -> None:
    """Global batches of consecutive elements at every world size, with and without workers, to the very end."""
    case.requires("native_loader")
    whole = 6 * case.backend.devices
    for workers in (0, 2):
        loader = case.strategy.loader(Stream(whole * 3 + 5), global_batch=whole, workers=workers)
        got = [sorted(set(batch(case, x))) for x in loader]
        assert [step[:whole] for step in got[:3]] == [list(range(i, i + whole)) for i in range(0, whole * 3, whole)]
        assert set(range(whole * 3, whole * 3 + 5)) <= set(got[3])
        assert len(got) == 4
        dropped = case.strategy.loader(Stream(whole * 3 + 5), global_batch=whole, tail="drop", workers=workers)
        assert len([batch(case, x) for x in dropped]) == 3
    with refused(UsageError, "shuffle"):
        case.strategy.loader(Stream(8), global_batch=whole, shuffle=True)


@check
def stream_trains_like_arrays(case: Case) -> None:
    """Weights by sample count, at the uneven end too."""
    case.requires("native_loader")
    whole = 4 * case.backend.devices * case.size
    for tail in (3, 2 * case.size):  # the ranks' shares differ also where their number divides it
        x, y = reference.data(whole * 2 + tail)
        model, optimizer = case.strategy.prepare(case.mlp(), SGD(0.5))
        step = case.strategy.train_step(model, optimizer, case.zoo.cross_entropy)
        for inputs, labels in case.strategy.loader(PairStream(x, y), per_device_batch=4):
            step(inputs, labels)
        serial = reference.Serial(reference.weights(), SGD(0.5))
        for first in range(0, len(x), whole):
            serial.step(x[first : first + whole], y[first : first + whole])
        case.close_to_serial(model, serial)


class PairStream:
    def __init__(self, x: Any, y: Any) -> None:
        self._x, self._y = x, y

    def __iter__(self) -> Iterator[Any]:
        return zip(self._x, self._y, strict=True)


@check
def position_resumes_on_another_number_of_ranks(case: Case) -> None:
    """Twelve samples were consumed in batches of 6; the rest comes in batches of 12, none twice, none left out."""
    order = permutation(48 * case.backend.devices, 5, 0).tolist()
    size = len(order)
    small, large = 6 * case.backend.devices, 12 * case.backend.devices
    for source in (np.arange(size), Numbers(size)):
        if not isinstance(source, np.ndarray) and case.strategy.capabilities.native_loader is not True:
            continue
        before = case.strategy.loader(source, global_batch=small, shuffle=True, seed=5)
        for _, _ in zip(before, range(2), strict=False):
            pass
        after = case.strategy.loader(source, global_batch=large, shuffle=True, seed=5)
        after.load_state(before.state())
        got = [n for x in after for n in batch(case, x)]
        assert got == order[before.state()["samples"] :]
        assert [batch(case, x) for x in after] != [], "the next pass is a whole one"
        assert after.epoch == 2


@check
def stream_position_resumes(case: Case) -> None:
    case.requires("native_loader")
    whole = 6 * case.backend.devices
    before = case.strategy.loader(Stream(whole * 4), global_batch=whole)
    for _ in before:
        break
    after = case.strategy.loader(Stream(whole * 4), global_batch=whole)
    after.load_state(before.state())
    assert [n for x in after for n in batch(case, x)] == list(range(whole, whole * 4))

"""Batch arithmetic, the order of samples, and the loader by itself."""

import dataclasses
import threading
from collections import UserDict, defaultdict
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unidist.data import nested
from unidist.data.batch import Batch
from unidist.data.loader import IndexedLoader
from unidist.data.order import Epoch, permutation
from unidist.data.source import ArraySource, elements_of
from unidist.errors import UsageError


def test_the_arithmetic_of_two_workers_with_four_devices():
    batch = Batch.of(64, None, devices=4, workers=2)
    assert (batch.per_worker, batch.global_batch) == (256, 512)
    assert str(batch) == "64 per device x 4 devices = 256 per worker, x 2 workers = 512 global"
    assert Batch.of(None, 512, devices=4, workers=2) == batch


def test_a_global_batch_that_does_not_divide_names_its_neighbours():
    with pytest.raises(UsageError, match="504 or 512"):
        Batch.of(None, 510, devices=4, workers=2)


@pytest.mark.parametrize(("scale", "factor"), [(None, 1.0), ("linear", 8.0), ("sqrt", 8.0**0.5)])
def test_learning_rate_scaling_is_asked_for_by_name(scale, factor):
    assert Batch.of(64, None, devices=4, workers=2, scale=scale).lr_scale == factor


def test_workers_that_update_on_their_own_do_not_make_a_larger_batch():
    assert Batch.of(64, None, devices=4, workers=2, scale="linear", lockstep=False).lr_scale == 4.0
    assert Batch.of(64, None, devices=4, workers=2, scale="sqrt", lockstep=False).lr_scale == 2.0


def test_scaling_a_fixed_global_batch_is_refused():
    with pytest.raises(UsageError, match="does not grow"):
        Batch.of(None, 512, devices=1, workers=2, scale="linear")


def test_the_permutation_never_changes():
    """Written down once: another NumPy, machine or release must give the same order, or checkpoints cannot resume."""
    assert permutation(10, 0, 0).tolist() == PINNED[0]
    assert permutation(10, 0, 1).tolist() == PINNED[1]
    assert permutation(10, 1, 0).tolist() == PINNED[2]


PINNED = (
    [1, 8, 9, 3, 6, 5, 0, 7, 4, 2],
    [5, 2, 8, 6, 9, 1, 7, 4, 0, 3],
    [9, 8, 5, 3, 0, 1, 4, 7, 6, 2],
)


def test_the_permutation_is_fair():
    """Over many epochs every sample is about as often first as any other."""
    first = np.bincount([permutation(10, 0, epoch)[0] for epoch in range(5000)], minlength=10)
    assert first.min() > 400
    assert first.max() < 600


epochs = st.builds(
    lambda size, per_worker, workers, shuffle, tail: (size, Batch(per_worker, 1, workers), shuffle, tail),
    st.integers(1, 60),
    st.integers(1, 8),
    st.integers(1, 5),
    st.booleans(),
    st.sampled_from(["keep", "pad", "drop"]),
)


@given(epochs, st.integers(0, 3))
def test_shards_are_disjoint_and_cover(case, number):
    size, batch, shuffle, tail = case
    if tail == "drop" and size < batch.global_batch:
        with pytest.raises(UsageError, match="tail='drop'"):
            Epoch(size, batch, number=number, shuffle=shuffle, seed=1, tail=tail)
        return
    epoch = Epoch(size, batch, number=number, shuffle=shuffle, seed=1, tail=tail)
    seen = []
    for step in range(epoch.steps):
        parts = [epoch.counts(rank, step) for rank in range(batch.workers)]
        shares = [epoch.rows(rank, step) for rank in range(batch.workers)]
        real = [index for part, share in zip(parts, shares, strict=True) for index in share[: part.real].tolist()]
        first = step * batch.global_batch
        assert real == epoch.order[first : first + len(real)].tolist(), "global batches follow the order"
        assert {part.total for part in parts} == {len(real)}
        assert [part.rows for part in parts] == [len(share) for share in shares]
        assert all(part.rows >= 1 for part in parts), "every rank takes part in every step"
        if tail == "pad":
            assert {part.rows for part in parts} == {batch.per_worker}
        else:
            assert max(p.real for p in parts) - min(p.real for p in parts) <= 1
        seen += real
    assert len(seen) == len(set(seen)) == (size if tail != "drop" else size // batch.global_batch * batch.global_batch)


@given(epochs)
def test_blocks_are_the_steps_one_after_the_other(case):
    size, batch, shuffle, tail = case
    if tail == "drop" and size < batch.global_batch:
        return
    epoch = Epoch(size, batch, number=0, shuffle=shuffle, seed=1, tail=tail)
    for rank in range(batch.workers):
        steps = [epoch.rows(rank, step).tolist() for step in range(epoch.steps)]
        assert epoch.indices(rank, 0, epoch.steps).tolist() == [index for step in steps for index in step]
        counts = [epoch.counts(rank, step) for step in range(epoch.steps)]
        mask = [n < each.real for each in counts for n in range(each.rows)]
        assert epoch.real(rank, 0, epoch.steps).tolist() == mask


@given(epochs, st.integers(0, 60), st.integers(1, 5))
def test_a_pass_resumes_on_another_number_of_ranks(case, consumed, workers):
    size, batch, shuffle, tail = case
    if tail == "drop" or consumed >= size:
        return
    how = {"number": 1, "shuffle": shuffle, "seed": 1, "tail": tail}
    whole = Epoch(size, batch, **how)
    rest = Epoch(size, Batch(batch.per_device, 1, workers), start=consumed, **how)
    assert rest.order.tolist() == whole.order.tolist()[consumed:]
    seen = [
        n
        for step in range(rest.steps)
        for rank in range(workers)
        for n in rest.rows(rank, step)[: rest.counts(rank, step).real].tolist()
    ]
    assert seen == rest.order.tolist()


@given(st.integers(0, 60), st.integers(0, 30), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_a_stream_is_shared_out_completely(size, skip, share, ranks, workers):
    parts = {
        (rank, worker): list(
            elements_of(
                range(size),
                skip=skip,
                batch=share * ranks,
                share=range(rank * share, (rank + 1) * share),
                worker=worker,
                workers=workers,
            )
        )
        for rank in range(ranks)
        for worker in range(workers)
    }
    everything = sorted(n for part in parts.values() for n in part)
    assert everything == list(range(skip, size))


def loader(data, batch=None, prefetch=True, keep_float64=False, on_batch=lambda info, batch: None, **how):
    source = ArraySource(data, prefetch=prefetch, keep_float64=keep_float64, to_device=lambda array: array)
    settings = {"rank": 0, "shuffle": False, "seed": 0, "tail": "keep", **how}
    return IndexedLoader(source, batch or Batch(4), on_batch, **settings)


def test_batches_are_views_of_one_vectorised_read():
    x, y, z = list(loader(np.arange(40).reshape(10, 4)))
    assert x.base is y.base or x.base.base is y.base.base
    assert len(z) == 2


def test_a_memory_map_stays_one(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(40.0).reshape(10, 4))
    data = loader(str(tmp_path / "x.npy"))
    np.lib.format.open_memmap(tmp_path / "x.npy", mode="r+")[:, 0] = 7  # it is read when a batch needs it
    assert [x[:, 0].tolist() for x in data] == [[7] * 4, [7] * 4, [7] * 2]


def test_the_reading_thread_ends_when_the_loop_is_left():
    wide = np.zeros((600, 3000), dtype=np.float32)
    for _ in loader(wide):
        break
    for thread in threading.enumerate():
        if thread.name.startswith("unidist-loader"):
            thread.join(timeout=10)
            assert not thread.is_alive()


class Unreadable(np.ndarray):
    def take(self, *_, **__):
        raise OSError(f"the disk is gone, says {threading.current_thread().name}")


def test_an_error_in_the_reading_thread_reaches_the_loop():
    data = loader(np.zeros((600, 3000), dtype=np.float32).view(Unreadable))
    with pytest.raises(OSError, match="the disk is gone, says unidist-loader"):
        list(data)


def test_big_endian_files_arrive_native():
    (x,) = loader(np.arange(4, dtype=">f4"))
    assert x.dtype.isnative
    assert x.tolist() == [0, 1, 2, 3]


def test_the_place_is_kept_until_the_next_pass():
    data = loader(np.arange(10))
    assert data.state()["samples"] == 0
    for number, _ in enumerate(data):
        assert data.state() == {"epoch": 0, "samples": 4 * (number + 1), "size": 10, "shuffle": False, "seed": 0}
        if number == 1:
            break
    assert (data.state()["epoch"], data.state()["samples"]) == (0, 8), "where it was left"
    resumed = loader(np.arange(10))
    resumed.load_state(data.state())
    assert len(resumed) == 1
    assert [x.tolist() for x in resumed] == [[8, 9]]
    assert (resumed.state()["epoch"], resumed.state()["samples"]) == (1, 0), "a finished pass is the start of the next"
    assert len(list(resumed)) == 3


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: object
    note: str = "n"


class WithShape(NamedTuple):
    x: np.ndarray
    shape: tuple[int, int] = (224, 224)


@dataclasses.dataclass
class RecordWithShape:
    x: np.ndarray
    shape: tuple[int, int] = (224, 224)


@pytest.mark.parametrize("kind", [WithShape, RecordWithShape])
def test_a_field_called_shape_makes_no_array(kind):
    assert [each.tolist() for each in nested.arrays_of(kind(np.arange(3)))] == [[0, 1, 2]]


class Named(NamedTuple):
    a: object
    b: object


@pytest.mark.parametrize(
    "kind",
    [
        lambda x, y: {"x": x, "y": y},
        lambda x, y: UserDict(x=x, y=y),
        lambda x, y: defaultdict(list, x=x, y=y),
        lambda x, y: [x, (y, "plain")],
        lambda x, y: Named(x, {"inner": y}),
        lambda x, y: (Frozen(x), Frozen(y)),
    ],
)
def test_arrays_are_found_and_changed_in_any_container(kind):
    value = kind(np.arange(2), np.arange(3))
    changed = nested.map_leaves(lambda leaf: leaf + 1 if isinstance(leaf, np.ndarray) else leaf, value)
    assert type(changed) is type(value)
    assert [each.tolist() for each in nested.arrays_of(changed)] == [[1, 2], [1, 2, 3]]
    assert [each.tolist() for each in nested.arrays_of(value)] == [[0, 1], [0, 1, 2]], "changed in place"


def test_mapping_that_cannot_be_changed_becomes_a_dict():
    assert nested.map_leaves(str, MappingProxyType({"a": [1, 2]}), lists=tuple) == {"a": ("1", "2")}


def test_the_place_does_not_pass_a_batch_that_is_being_handed_out():
    """A thread may read it while the loop saves."""
    places = []
    read = loader(np.arange(12), on_batch=lambda info, batch: places.append(read.state()["samples"]))
    assert [len(each) for each in read] == [4, 4, 4]
    assert places == [0, 4, 8]

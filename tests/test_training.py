"""The weights of micro-batches and the optimizers' specs, without any framework."""

import weakref
from types import SimpleNamespace

import numpy as np
import pytest

import unidist
from unidist.data.batch import Batch
from unidist.data.order import Epoch
from unidist.data.tracking import BatchInfo, Pass
from unidist.errors import UsageError
from unidist.training.accumulation import Schedule
from unidist.training.drift import DriftCheck, compare_at_the_end


def handed_out(size, workers, rank, step, per_worker=4):
    epoch = Epoch(size, Batch(per_worker, 1, workers), number=0, shuffle=False, seed=0, tail="keep")
    real, rows, total = epoch.counts(rank, step)
    last, even = step == epoch.steps - 1, total % workers == 0
    return BatchInfo(Pass(weakref.ref(epoch), epoch), step, epoch.batch, rows, real, total, last, even, (0, 0))


def largest(samples):
    return max(samples, 4.0)  # some rank has a full batch


def turn_of(schedule, info):
    return schedule.plan(1.0 if info is None else float(info.real), info, largest, last=bool(info and info.last))


def weights_of_samples(turns, infos):
    return [turn.micro.weight / info.real for turn, info in zip(turns, infos, strict=True) for _ in range(info.real)]


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 7, 24, 29, 50])
def test_every_sample_of_a_group_weighs_the_same(workers, accumulate, size):
    """A sample's weight in the update, once the mean weight that travels with the gradients is divided out."""
    schedules = [Schedule(unidist.SGD(0.1), accumulate, exchanges=workers > 1, ranks=workers) for _ in range(workers)]
    group, travelling, steps = [], 0.0, handed_out(size, workers, 0, 0).origin.plan.steps
    for step in range(steps):
        infos = [handed_out(size, workers, rank, step) for rank in range(workers)]
        turns = [turn_of(schedule, info) for schedule, info in zip(schedules, infos, strict=True)]
        assert len({turn.closes for turn in turns}) == 1
        assert not any(turn.micro.weight for turn, info in zip(turns, infos, strict=True) if info.real == 0)
        group += weights_of_samples(turns, infos)
        travelling += sum(turn.micro.weight for turn in turns) / workers
        if turns[0].closes:
            rescale = turns[0].rescale if workers == 1 else 1 / travelling
            weights = [weight * rescale / workers for weight in group]
            assert weights == pytest.approx([1 / len(group)] * len(group))
            group, travelling = [], 0.0
    assert group == [], "the end of a pass closes the group"


def test_complete_groups_need_no_correction():
    schedule = Schedule(unidist.SGD(0.1), 2, exchanges=True, ranks=2)
    turns = [turn_of(schedule, handed_out(32, 2, 0, step)) for step in range(4)]
    assert [turn.closes for turn in turns] == [False, True, False, True]
    assert {turn.micro.weight for turn in turns} == {0.5}, "their mean weight is 1"


def test_the_rate_follows_the_updates():
    schedule = Schedule(unidist.SGD(lambda update: 10.0 - update), 2, exchanges=False, ranks=1)
    rates = []
    for _ in range(6):
        turn = turn_of(schedule, None)
        if turn.closes:
            rates.append(schedule.update(turn, None).lr)
    assert rates == [10.0, 9.0, 8.0]
    assert isinstance(unidist.SGD(1).rate(0), float)
    constant = Schedule(unidist.SGD(0.1), 1, exchanges=False, ranks=1)
    assert constant.update(turn, None).lr is None, "a constant rate is left to the optimizer"


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: unidist.SGD(-0.1), "lr"),
        (lambda: unidist.SGD("0.1"), "lr"),
        (lambda: unidist.SGD(0.1, momentum=1.0), "momentum"),
        (lambda: unidist.SGD(0.1, nesterov=True), "nesterov"),
        (lambda: unidist.Adam(0.1, betas=(0.9, 1.0)), "betas"),
        (lambda: unidist.Adam(0.1, betas=0.9), "betas"),
        (lambda: unidist.AdamW(0.1, weight_decay=-1), "weight_decay"),
        (lambda: unidist.SGD(lambda step: float("nan")).rate(3), r"lr\(3\)"),
    ],
)
def test_bad_optimizers_are_refused(make, word):
    with pytest.raises(UsageError, match=word):
        make()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_local_sgd_goes_by_its_own_samples_and_averages_on_time(accumulate):
    schedule = Schedule(unidist.SGD(0.1), accumulate, sync_every=2, exchanges=True, ranks=2)
    turns = []
    for step in range(7):  # 50 samples, 8 a step: the last one holds one on each rank
        turn = turn_of(schedule, handed_out(50, 2, 0, step))
        turns.append(turn)
        if turn.closes:
            schedule.update(turn, None)
    assert not any(turn.micro.sync for turn in turns)
    averaged = [number for number, turn in enumerate(turns, 1) if turn.average]
    assert averaged == ([2, 4, 6, 7] if accumulate == 1 else [4, 7])
    assert turns[-1].micro.weight * turns[-1].rescale == pytest.approx(1.0), "the local mean, however few samples"


@pytest.mark.parametrize("accumulate", [1, 2])
def test_out_of_lockstep_every_rank_applies_its_own_mean(accumulate):
    """Nine samples on two ranks in steps of four each: the tail is one sample on rank 0, and nothing on rank 1."""
    for rank, tail in ((0, 1), (1, 0)):
        schedule = Schedule(unidist.SGD(0.1), accumulate, exchanges=False, ranks=2)
        weights, updates = [], []
        for step in range(2):
            info = handed_out(9, 2, rank, step)
            turn = turn_of(schedule, info)
            weights += weights_of_samples([turn], [info])
            if turn.closes:
                updates.append([weight * turn.rescale for weight in weights])
                weights = []
        expected = [[1 / 4] * 4, [1.0] * tail] if accumulate == 1 else [[1 / (4 + tail)] * (4 + tail)]
        assert [pytest.approx(each) for each in expected] == updates


class OneModel:
    """A backend whose only model is a dict of arrays."""

    parameters = staticmethod(lambda model: model.arrays)
    to_numpy = staticmethod(np.asarray)


class OtherRank:
    """Answers each gathering with what this rank says, and what a rank with another model would have said."""

    def __init__(self, model):
        self._model, self._drift = model, DriftCheck(OneModel(), None)

    def gather(self, what, mine, _):
        if what != "the end":
            return [mine, self._drift.outline(self._model)]
        return [mine, {**mine, "checksums": {"1": self._drift.checksum(self._model)}}]


def said_at_the_end(mine, theirs):
    mine, theirs = (SimpleNamespace(arrays={"w": np.asarray(each, np.float32)}) for each in (mine, theirs))
    schedule = SimpleNamespace(number=1)
    prepared = SimpleNamespace(model=lambda: mine, schedule=schedule, drift=DriftCheck(OneModel(), None))
    return compare_at_the_end([prepared], OtherRank(theirs), made=3)


def test_what_differs_at_the_end_is_told_unless_it_is_rounding():
    weights = np.linspace(-2, 2, 1000, dtype=np.float32)
    assert said_at_the_end(weights, weights) == ""
    assert said_at_the_end(weights, np.nextafter(weights, np.float32(9))) == ""
    assert "model 1" in said_at_the_end(weights, weights + np.float32(0.01) * (np.arange(1000) == 7))
    assert "model 1" in said_at_the_end(weights, weights[::-1])


def test_sums_and_means_do_not_make_one_update():
    schedule = Schedule(unidist.SGD(0.1), 2, exchanges=True, ranks=2)
    for first, second in (("mean", "sum"), ("sum", "mean")):
        for reduction in (first, first, second, second, first):  # a group may be of either kind
            schedule.check_reduction(reduction)
            schedule.plan(4.0, None, largest, reduction)
        with pytest.raises(UsageError, match="flush"):
            schedule.check_reduction(second)
        schedule.give_up(0)

"""The weights of micro-batches and the optimizers' specs, without any framework."""

import pytest

import unidist
from unidist.data.batch import Batch
from unidist.data.loader import Drawn
from unidist.data.order import Epoch
from unidist.errors import UsageError
from unidist.training import Schedule


def drawn(size, workers, rank, step, per_worker=4):
    epoch = Epoch(size, Batch(per_worker, 1, workers), number=0, shuffle=False, seed=0, tail="keep")
    real, rows, total = epoch.counts(rank, step)
    uneven = total % epoch.batch.workers != 0
    return Drawn(epoch, epoch.batch, step, rows, real, total, step == epoch.steps - 1, uneven)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 7, 24, 29, 50])
def test_every_sample_of_a_group_weighs_the_same(workers, accumulate, size):
    """A sample's weight in the update: rank mean x weight / rows / ranks x rescale; all equal, and summing to one."""
    schedules = [Schedule(unidist.SGD(0.1), accumulate) for _ in range(workers)]
    group, steps = [], drawn(size, workers, 0, 0).origin.steps
    for step in range(steps):
        batches = [drawn(size, workers, rank, step) for rank in range(workers)]
        turns = [schedule.turn(batch) for schedule, batch in zip(schedules, batches, strict=True)]
        assert len({turn.closes for turn in turns}) == 1
        group += [
            (turn.weight / batch.rows / workers)
            for turn, batch in zip(turns, batches, strict=True)
            for _ in range(batch.real)
        ]
        padding = [turn.weight for turn, batch in zip(turns, batches, strict=True) if batch.real == 0]
        assert not any(padding)
        if turns[0].closes:
            weights = [weight * turns[0].rescale for weight in group]
            assert weights == pytest.approx([1 / len(group)] * len(group))
            group = []
    assert group == [], "the end of a pass closes the group"


def test_complete_groups_need_no_correction():
    schedule = Schedule(unidist.SGD(0.1), 2)
    turns = [schedule.turn(drawn(32, 2, 0, step)) for step in range(4)]
    assert [turn.closes for turn in turns] == [False, True, False, True]
    assert {turn.rescale for turn in turns} == {1.0}


def test_the_rate_follows_the_updates():
    schedule = Schedule(unidist.SGD(lambda update: 10.0 - update), 2)
    rates = []
    for _ in range(6):
        turn = schedule.turn(None)
        if turn.closes:
            rates.append(schedule.update(turn, None).lr)
    assert rates == [10.0, 9.0, 8.0]
    assert isinstance(unidist.SGD(1).rate(0), float)
    assert Schedule(unidist.SGD(0.1), 1).update(turn, None).lr is None, "a constant rate is left to the optimizer"


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
    schedule = Schedule(unidist.SGD(0.1), accumulate, sync_every=2)
    turns = []
    for step in range(7):  # 50 samples, 8 a step: the last one holds one on each rank
        turn = schedule.turn(drawn(50, 2, 0, step))
        turns.append(turn)
        if turn.closes:
            schedule.update(turn, None)
    assert not any(turn.sync for turn in turns)
    averaged = [number for number, turn in enumerate(turns, 1) if turn.average]
    assert averaged == ([2, 4, 6, 7] if accumulate == 1 else [4, 7])
    assert turns[-1].weight * turns[-1].rescale == pytest.approx(1.0), "the local mean, however few samples"


@pytest.mark.parametrize("accumulate", [1, 2])
def test_out_of_lockstep_every_rank_applies_its_own_mean(accumulate):
    """Nine samples on two ranks in steps of four each: the tail is one sample on rank 0, and nothing on rank 1."""
    for rank, tail in ((0, 1), (1, 0)):
        schedule = Schedule(unidist.SGD(0.1), accumulate, lockstep=False)
        weights, updates = [], []
        for step in range(2):
            batch = drawn(9, 2, rank, step)
            turn = schedule.turn(batch)
            weights += [turn.weight / batch.rows] * batch.real
            if turn.closes:
                updates.append([weight * turn.rescale for weight in weights])
                weights = []
        expected = [[1 / 4] * 4, [1.0] * tail] if accumulate == 1 else [[1 / (4 + tail)] * (4 + tail)]
        assert [pytest.approx(each) for each in expected] == updates

"""Ranks that wait for each other in different calls are told from those that only take their time."""

from __future__ import annotations

from roll_job import Job
from unidist.control.calls import KEPT, Calls
from unidist.control.roll import LONG_STEP

START = {1: "start-up"}


def step(begun: int, others: dict[int, str] = START, skipped: bool = False) -> Calls:
    """A rank that is in a step, or has queued it."""
    return Calls(begun, others, True, skipped)


def call(begun: int, name: str, others: dict[int, str] = START) -> Calls:
    """A rank that waits for the others in something else."""
    return Calls(begun, {**others, begun: name}, True)


def test_ranks_that_wait_in_different_calls_are_named() -> None:
    job = Job(3)
    job.stand(call(7, "save"), step(7), step(7))
    (cause,) = job.announced
    assert cause.rank == 0
    assert "rank 0: save; ranks 1, 2: step" in cause.what


def test_a_call_of_one_rank_is_found_behind_steps_that_others_have_queued() -> None:
    job = Job()
    job.stand(call(7, "barrier"), step(130, {1: "start-up", 40: "barrier"}))
    assert [cause.rank for cause in job.announced] == [0]


def test_a_rank_that_is_only_late_is_waited_for() -> None:
    job = Job()
    job.stand(call(7, "save"), step(6))
    job.stand(call(7, "save"), Calls(6, START))  # it is done with its step, and busy with something else
    assert job.announced == []


def test_who_gets_on_is_not_compared() -> None:
    job = Job()
    for moves in range(20):
        job.stand(call(7 + moves, "save"), step(7 + moves), moves=moves, seconds=2)
    assert job.announced == []


def test_who_is_not_heard_is_not_compared() -> None:
    job = Job()
    job.at(1, 7, True)
    job.at(1, 7, True)
    job.stand(call(7, "save"))
    assert job.announced == []


def test_what_all_have_returned_from_is_no_reason_to_wait() -> None:
    """However they called it: rank 0 is busy for a while, and the other one waits for it in the next operation."""
    job = Job()
    job.stand(Calls(7, {7: "all_reduce sum"}), call(8, "barrier", {7: "all_reduce mean"}))
    assert job.announced == []


def test_calls_that_are_too_long_ago_are_not_guessed() -> None:
    """A heartbeat tells of the last eight: what came before them may have been anything."""
    job = Job()
    recent = {number: "barrier" for number in range(20, 20 + KEPT)}
    job.stand(call(9, "save"), Calls(27, recent))
    assert job.announced == []


def test_a_rank_that_went_on_after_an_error_is_named_when_all_wait() -> None:
    job = Job()
    job.stand(step(7), step(7, skipped=True))
    assert job.announced == []  # a step may take its time
    job.stand(step(7), step(7, skipped=True), seconds=LONG_STEP)
    (cause,) = job.announced
    assert cause.rank == 1
    assert "after an error had left one of its steps" in cause.what


def test_a_rank_that_went_on_while_others_get_on_is_not_named() -> None:
    job = Job(3)
    for moves in range(100):
        for rank in range(3):
            job.at(rank, 7 + moves * (rank == 2), True, skipped=rank == 1, moves=moves * (rank == 2))
        job.passes(1.0)
    assert job.announced == []


def test_all_have_skipped_a_step() -> None:
    job = Job()
    job.stand(step(7, skipped=True), step(7, skipped=True), seconds=3 * LONG_STEP)
    assert job.announced == []

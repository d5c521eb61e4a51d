"""Which process has failed first, and whom it concerns."""

from __future__ import annotations

from roll_job import Job
from unidist.control.roll import GRACE, SETTLING


def test_all_give_up_each_in_its_time() -> None:
    job = Job(3)
    for rank in range(3):
        job.at(rank, 7)
    for rank in (1, 0, 2):
        job.gives_up(rank, 7)
        job.passes(100)
        job.roll.lose(rank)
    assert job.announced == []
    assert job.answers == [None] * 3  # nobody is ended for the first one's error


def test_who_begins_what_one_never_joins_ends_with_it() -> None:
    job = Job()
    job.gives_up(1, 7)
    job.at(0, 7)
    job.passes(100)
    assert job.announced == []
    job.at(0, 8)
    assert [cause.rank for cause in job.announced] == [1]


def test_who_stays_in_what_one_has_broken_off_ends_with_it() -> None:
    job = Job(3)
    for rank in range(3):
        job.at(rank, 7, inside=True)
    job.gives_up(1, 7, inside=True)
    job.passes(GRACE / 2)
    job.gives_up(2, 7, inside=True)  # fails in the same way
    assert job.announced == []
    job.passes(GRACE / 2)
    assert [cause.rank for cause in job.announced] == [1]


def test_who_has_finished_what_one_has_broken_off_goes_on() -> None:
    job = Job()
    job.at(0, 7, inside=True)
    job.gives_up(1, 7, inside=True)
    job.at(0, 7)
    job.passes(100)
    assert job.announced == []


def test_an_error_that_nobody_caught_ends_all() -> None:
    job = Job()
    job.gives_up(1, 7)
    job.roll.fails(1, ("error of 1", ()), False, job.answers.append)
    job.passes(SETTLING)
    assert [cause.what for cause in job.announced] == ["error of 1"]


def test_a_long_error_is_one_error() -> None:
    """It is cut where it is kept."""
    job, long = Job(3), "long " * 2000
    job.roll.gives_up(0, (7, False), (long, ()), False, False, job.answers.append)
    job.gives_up(1, 7)
    job.roll.fails(0, (long, ()), False, job.answers.append)
    job.passes(SETTLING)
    assert [cause.rank for cause in job.announced] == [0]


def test_an_exit_with_a_code_ends_all_when_it_has_come_to_that() -> None:
    job = Job()
    job.gives_up(1, 7, fatal=True)
    job.passes(100)
    assert job.announced == []  # it may still be caught
    job.roll.lose(1)
    assert [cause.rank for cause in job.announced] == [1]


def test_services_end_well_with_the_last_worker() -> None:
    job = Job(2, services=2)
    for rank in (0, 1):
        assert job.over == 0
        job.gives_up(rank, 7)
        job.passes(100)
        job.roll.lose(rank)
    assert job.over == 1
    for service in (2, 3):
        job.roll.lose(service)
    assert job.announced == []


def test_services_end_with_a_worker_whose_code_says_that_it_failed() -> None:
    job = Job(2, services=1)
    for rank in (0, 1):
        job.gives_up(rank, 7, fatal=rank == 1)
        job.passes(100)
        job.roll.lose(rank)
    assert [cause.rank for cause in job.announced] == [0]
    assert job.over == 0


def test_the_cause_is_known_to_who_asks_though_all_have_lost_it_before() -> None:
    """Their engine is quicker than the end of the connection."""
    job = Job(3)
    for rank in (0, 2):
        job.gives_up(rank, 7, inside=True, echo=True)
    job.roll.tell_first(job.answers.append)
    job.roll.lose(1)
    job.passes(SETTLING)
    assert [cause and cause.rank for cause in job.answers] == [1, 1, 1]


def test_who_is_at_its_end_outlasts_those_that_are_busy() -> None:
    job, let_go = Job(3), list[tuple[int, str]]()
    for rank in range(3):
        job.at(rank, 7)
    for rank in (0, 2):
        job.gives_up(rank, 7)
        job.roll.outlasts(rank, 0, lambda how, rank=rank: let_go.append((rank, how)))
    job.passes(100)
    assert let_go == []  # rank 1 may be busy with anything
    job.roll.exits(1, 7)
    assert let_go == []
    job.roll.outlasts(1, 0, lambda how: let_go.append((1, how)))
    assert sorted(let_go) == [(0, "gave up"), (1, "gave up"), (2, "gave up")]
    assert job.announced == []


def test_who_outlasts_the_others_is_named_when_they_need_it() -> None:
    job, let_go = Job(2), list[str]()
    job.at(0, 7)
    job.at(1, 7)
    job.gives_up(0, 7)
    job.roll.outlasts(0, 0, let_go.append)
    job.at(1, 8)
    assert [cause.rank for cause in job.announced] == [0]
    assert let_go == ["failed"]


def test_who_ends_with_an_error_waits_for_nobody_and_is_named() -> None:
    job, let_go = Job(2), list[str]()
    job.gives_up(0, 7)
    job.roll.outlasts(0, 3, let_go.append)
    assert let_go == ["failed"]
    assert [cause.what for cause in job.announced] == ["error of 0"]


def test_all_that_end_without_closing_may_end_as_they_like() -> None:
    job, let_go = Job(2), list[str]()
    for rank in (1, 0):
        job.roll.exits(rank, 7)
        job.roll.outlasts(rank, 0, let_go.append)
    assert let_go == ["exits", "exits"]


def test_who_ends_after_fewer_steps_than_one_that_has_ended_is_named() -> None:
    """The others have queued steps that it will never join."""
    job, let_go = Job(2), list[str]()
    job.roll.exits(0, 40)
    job.roll.outlasts(0, 0, let_go.append)
    assert job.announced == []  # rank 1 may be on its way
    job.roll.exits(1, 5)
    assert [cause.rank for cause in job.announced] == [1]
    assert let_go == ["failed"]


def test_who_is_killed_at_its_end_is_missed_by_those_who_wait_for_all() -> None:
    job, let_go = Job(3), list[str]()
    for rank in (0, 1):
        job.roll.exits(rank, 7)
        job.roll.outlasts(rank, 0, let_go.append)
    job.roll.lose(0)
    assert [cause.rank for cause in job.announced] == [0]
    assert let_go == ["failed"]


def test_who_was_let_go_is_not_missed() -> None:
    job, let_go = Job(2), list[str]()
    for rank in (0, 1):
        job.roll.exits(rank, 7)
        job.roll.outlasts(rank, 0, let_go.append)
    job.roll.lose(0)
    job.roll.lose(1)
    assert let_go == ["exits", "exits"]
    assert job.announced == []


def test_a_real_error_comes_before_one_that_was_caught() -> None:
    job = Job(2)
    job.gives_up(0, 7)
    job.gives_up(1, 7)
    job.passes(100)
    job.roll.fails(1, ("the real cause", ()), False, job.answers.append)
    job.passes(100)
    assert [cause.what for cause in job.roll.reports()] == ["the real cause", "error of 0"]
    assert job.answers[-1] is None  # rank 1 shows its own error


def test_an_error_that_was_caught_comes_before_its_echo() -> None:
    job = Job(2)
    job.gives_up(0, 7)
    job.passes(100)
    job.roll.fails(1, ("connection closed", ()), True, job.answers.append)
    job.passes(100)
    assert [cause.what for cause in job.roll.reports()] == ["error of 0", "connection closed"]


def test_an_error_that_nobody_catches_counts_from_when_it_left_the_strategy() -> None:
    job = Job(2)
    job.gives_up(0, 7)
    job.roll.fails(1, ("of the engine", ()), False, job.answers.append)
    job.roll.fails(0, ("error of 0", ()), False, job.answers.append)
    job.passes(100)
    assert [cause.what for cause in job.roll.reports()] == ["error of 0", "of the engine"]


def test_who_closes_its_strategy_while_others_train_is_named() -> None:
    job = Job(2)
    job.at(1, 7, operation="leave")
    job.at(0, 6)
    job.passes(100)
    assert job.announced == []  # rank 0 may yet come to it
    job.at(0, 7)
    job.passes(GRACE)
    assert [(cause.rank, "closed its Strategy" in cause.what) for cause in job.announced] == [(1, True)]


def test_who_closes_its_strategy_first_is_waited_for() -> None:
    job = Job(2)
    job.at(1, 7, operation="leave")
    job.at(0, 6)
    job.passes(GRACE)
    job.at(0, 7, operation="evaluate: leave")
    job.passes(GRACE)
    assert job.announced == []


def test_who_ended_without_a_word_is_named_by_the_one_that_lost_it() -> None:
    """By the last beat of the survivor, both were as far."""
    for way in ("fails", "gives up"):
        job = Job(2)
        job.at(0, 7)
        job.roll.exits(1, 7)
        assert job.announced == []
        if way == "fails":
            job.roll.fails(0, ("PeerFailed: connection closed", ()), True, job.answers.append)
        else:
            job.gives_up(0, 8, inside=True, echo=True)
        job.passes(100)
        assert [cause.rank for cause in job.roll.reports()] == [1, 0]
        assert [cause and cause.rank for cause in job.answers] == [1]


def test_who_ended_is_not_blamed_for_an_error_of_another() -> None:
    job = Job(2)
    job.roll.exits(1, 7)
    job.roll.fails(0, ("its own", ()), False, job.answers.append)
    job.passes(100)
    assert [cause.rank for cause in job.roll.reports()] == [0]

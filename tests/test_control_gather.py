"""What all ranks give to the control plane and agree on, and what is said when one is missing or differs."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from control_support import together
from unidist.control import Control, ControlServer, agree
from unidist.errors import CommunicationError, RanksDisagree, RanksMissing

pytest_plugins = ["control_support"]
pytestmark = pytest.mark.usefixtures("no_thread_stays")


def test_gather(control: Control) -> None:
    values: list[Any] = [{"a": [1]}, None, "x"]
    for _ in range(2):  # the same key again: the first use left nothing
        got = together(*(lambda r=r: control.gather("k", r, 3, values[r], 60) for r in range(3)))
        assert got == [values] * 3
    fewer = together(*(lambda r=r: control.gather("k", r, 2, r, 60) for r in range(2)))
    assert fewer == [[0, 1]] * 2


def test_gather_names_the_missing_to_everyone(control: Control) -> None:
    # Rank 3 would wait longer, but learns at once that rank 0 gave up; so does rank 1, which comes too late.
    errors = together(
        lambda: control.gather("start", 0, 4, 0, 0.2),
        lambda: control.gather("start", 3, 4, 3, 600),
    )
    errors += together(lambda: control.gather("start", 1, 4, 1, 600))
    for error in errors:
        assert isinstance(error, RanksMissing)
        assert "ranks 1, 2 did not come to 'start' within 0.2 s" in str(error)
        assert "ranks 0, 3 did" in str(error)


@pytest.mark.parametrize(
    ("rank", "size", "says"), [(1, 2, "two processes say they are rank 1"), (0, 3, "rank 0 .* said there are 3 ranks")]
)
def test_a_rank_twice_and_another_size_are_told_to_everyone(control: Control, rank: int, size: int, says: str) -> None:
    # Whichever comes first.
    errors = together(
        lambda: control.gather("k", 1, 2, "one", 60),
        lambda: control.gather("k", rank, size, None, 60),
    )
    for error in errors:
        assert isinstance(error, RanksDisagree)
        assert re.search(says, str(error))


def test_ranks_that_nobody_has_numbered(control: Control) -> None:
    got = together(*(lambda n=n: control.gather("k", -1, 3, n, 60) for n in range(3)))
    assert got[0] == got[1] == got[2]
    assert sorted(got[0]) == [0, 1, 2]


def test_who_leaves_a_gathering_is_named(server: ControlServer, control: Control) -> None:
    other = Control(server.url, server.token)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(control.gather, "k", 0, 3, None, 60)
        control.count("")  # a round trip later rank 0 is most likely there; when it is not, it is told the same
        other.tell("gather", key="k", rank=1, size=3, wait=60)  # which is on its way before the connection ends
        asking = pool.submit(other.get, "k", 60)
        other.close()
        with pytest.raises(RanksMissing, match=r"rank 1 on .* left 'k'"):
            waiting.result()
        with pytest.raises(CommunicationError, match="does not answer"):
            asking.result()


def test_agree(control: Control) -> None:
    def several(rank: int) -> None:
        for sequence in range(3):
            agree(control, sequence, rank, 3, "barrier", 60)

    assert together(*(lambda r=r: several(r) for r in range(3))) == [None] * 3


def test_disagreement_is_told_to_everyone(control: Control) -> None:
    wishes = [f"all_reduce mean float32 ({n},)" for n in (3, 4, 3, 3, 3)]
    errors = together(*(lambda r=r: agree(control, 7, r, 5, wishes[r], 60) for r in range(5)))
    for error in errors:
        assert isinstance(error, RanksDisagree)
        assert str(error) == (
            "the ranks want different things in collective 7: "
            "ranks 0, 2-4: all_reduce mean float32 (3,); rank 1: all_reduce mean float32 (4,)"
        )


def test_a_rank_that_does_not_come_to_a_collective(control: Control) -> None:
    errors = together(*(lambda r=r: agree(control, 7, r, 3, "barrier", 0.2 + 60 * r) for r in (0, 2)))
    for error in errors:
        assert isinstance(error, RanksMissing)
        assert "rank 1 did not come to collective 7" in str(error)
        assert "ranks 0, 2: barrier" in str(error)

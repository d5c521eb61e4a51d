"""Promise 6: collectives take what users hold, give it back in kind, and report a mismatch instead of hanging."""

from __future__ import annotations

from typing import Any

import numpy as np

from unidist.errors import RanksDisagree, UsageError
from unidist.testing.case import Case, check, close, refused


def results(size: int) -> dict[str, float]:
    """What each operation makes of the numbers 1 to `size`, one from each rank."""
    return {"sum": size * (size + 1) // 2, "mean": (size + 1) / 2, "min": 1, "max": size}


@check
def all_reduce_of_numbers(case: Case) -> None:
    for op, expected in results(case.size).items():
        got = case.strategy.all_reduce(case.rank + 1, op)
        assert got == expected
        assert type(got) is (float if op == "mean" else int)
        got = case.strategy.all_reduce(float(case.rank + 1), op)
        assert got == expected
        assert type(got) is float
    assert case.strategy.all_reduce(case.rank == 0, "max") is True
    assert case.strategy.all_reduce(case.rank == 0, "sum") == 1


@check
def all_reduce_of_numpy_arrays(case: Case) -> None:
    for dtype in (np.float64, np.float32, np.float16, np.int64, np.int32, np.int16, np.uint8):
        for op, expected in results(case.size).items():
            given = np.full((2, 3), case.rank + 1, dtype=dtype)
            got = case.strategy.all_reduce(given, op)
            assert isinstance(got, np.ndarray)
            assert got.shape == given.shape
            assert got.dtype == (np.float64 if op == "mean" and given.dtype.kind in "iu" else dtype)
            assert (got == expected).all(), f"{op} of {dtype}: {got}"
            assert (given == case.rank + 1).all(), "changed in place"


@check
def all_reduce_keeps_float64_exact(case: Case) -> None:
    """A sum through float32 would lose the last part."""
    assert case.strategy.all_reduce(1.0 + 2.0**-40, "max") == 1.0 + 2.0**-40
    assert case.strategy.all_reduce(2**53 + case.rank, "max") == 2**53 + case.size - 1


@check
def all_reduce_of_native_tensors(case: Case) -> None:
    for dtype in (np.float32, np.float64, np.int64, np.int32, np.uint8):
        for op, expected in results(case.size).items():
            given = case.backend.from_numpy(np.full((2, 3), case.rank + 1, dtype=dtype))
            got = case.strategy.all_reduce(given, op)
            assert type(got) is type(given)
            assert tuple(got.shape) == (2, 3)
            assert (case.backend.to_numpy(got) == expected).all(), f"{op} of {dtype}: {got}"
            assert (case.backend.to_numpy(given) == case.rank + 1).all(), "changed in place"


@check
def nested_values_come_back_nested(case: Case) -> None:
    native = case.backend.from_numpy(np.full(2, case.rank, dtype=np.float32))
    given = {"a": [1, (2.0, np.float32(3))], "b": native, "c": np.arange(3), "d": {}}
    got = case.strategy.all_reduce(given, "mean")
    assert list(got) == ["a", "b", "c", "d"]
    assert got["a"] == [1.0, (2.0, 3.0)]
    assert isinstance(got["a"][1], tuple)
    close([case.backend.to_numpy(got["b"])], [np.full(2, (case.size - 1) / 2)])
    assert (got["c"] == np.arange(3)).all()


@check
def all_gather_is_by_rank(case: Case) -> None:
    for kind in (np.float32, np.float64, np.int64, np.bool_, np.complex64):
        got = case.strategy.all_gather(np.full(3, case.rank, dtype=kind))
        assert len(got) == case.size
        assert all(np.array_equal(answer, np.full(3, rank, dtype=kind)) for rank, answer in enumerate(got))
        assert all(answer.dtype == kind for answer in got)
    native = case.strategy.all_gather({"x": case.backend.from_numpy(np.full(2, case.rank, dtype=np.float32))})
    assert [case.backend.to_numpy(array["x"]).tolist() for array in native] == [[r, r] for r in range(case.size)]


@check
def broadcast_from_every_rank(case: Case) -> None:
    for source in range(case.size):
        given: dict[str, Any] = {"n": case.rank, "x": np.full(3, case.rank + 0.5), "f": case.rank == source}
        got = case.strategy.broadcast(given, source)
        assert got["n"] == source
        assert (got["x"] == source + 0.5).all()
        assert got["f"] is True
        assert (given["x"] == case.rank + 0.5).all(), "changed in place"
        native = case.backend.from_numpy(np.full(2, case.rank, dtype=np.float32))
        assert case.backend.to_numpy(case.strategy.broadcast(native, source)).tolist() == [source, source]


@check
def mean_is_over_everything(case: Case) -> None:
    """Also when the ranks bring different numbers of values."""
    values: list[Any] = [float(case.rank)] * (case.rank + 1)
    everything = [float(rank) for rank in range(case.size) for _ in range(rank + 1)]
    assert case.strategy.mean(values) == np.mean(everything)
    native = case.backend.from_numpy(np.full(1, case.rank, dtype=np.float32))
    assert case.strategy.mean([native, native]) == (case.size - 1) / 2
    assert type(case.strategy.mean(3)) is float


@check
def what_is_not_a_number_is_refused(case: Case) -> None:
    for value in ("text", None, object(), {"deep": ["text"]}, np.array(["text"])):
        with refused(UsageError, "value"):
            case.strategy.all_reduce(value)


@check
def different_shapes_are_reported(case: Case) -> None:
    case.needs_ranks(2)
    case.needs_debugging()
    with refused(RanksDisagree, "(2,)", "(3,)", "rank 0"):
        case.strategy.all_reduce(np.zeros(2 if case.rank == 0 else 3))
    assert case.strategy.all_reduce(1, "sum") == case.size  # and the job can go on


@check
def different_dtypes_are_reported(case: Case) -> None:
    case.needs_ranks(2)
    case.needs_debugging()
    with refused(RanksDisagree, "float32", "float64"):
        case.strategy.all_gather(np.zeros(2, dtype=np.float32 if case.rank == 0 else np.float64))


@check
def different_operations_are_reported(case: Case) -> None:
    case.needs_ranks(2)
    case.needs_debugging()
    with refused(RanksDisagree, "barrier", "all_reduce"):
        case.strategy.barrier() if case.rank == 0 else case.strategy.all_reduce(1)

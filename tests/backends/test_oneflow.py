"""The OneFlow backend keeps every promise in both of its views, at world sizes 1, 2 and 3; below, what only it has."""

import oneflow_on_ranks as on_ranks
import pytest

import unidist
from unidist.testing import conformance

test_mirrored = conformance("oneflow", zoo="unidist_oneflow.zoo", world_sizes=(1, 2, 3), view="mirrored")
test_consistent = conformance("oneflow", zoo="unidist_oneflow.zoo", world_sizes=(1, 2, 3), view="consistent")


def on_two(function, **options):
    """What each of two ranks gave back, which is the same."""
    first, second = unidist.launch(function, nproc=2, backend="oneflow", quiet=True, **options)
    return first, second


def test_both_views_compiled_or_not_give_one_curve():
    mirrored, _ = on_two(on_ranks.curve)
    compiled, _ = on_two(on_ranks.curve, view="consistent")
    eager, _ = on_two(on_ranks.curve, view="consistent", graph=False)
    assert compiled == pytest.approx(mirrored, abs=2e-6)
    assert eager == pytest.approx(mirrored, abs=2e-6)


def test_model_that_cannot_be_traced_runs_eagerly_and_says_why():
    mirrored, _ = on_two(on_ranks.curve)
    (losses, said), (_, quiet) = on_two(on_ranks.model_that_cannot_be_traced, view="consistent")
    assert losses == pytest.approx(mirrored, abs=2e-6)
    assert said.count("runs eagerly, because nn.Graph cannot trace it") == 1
    assert quiet == ""


def test_consistent_view_shows_plain_values():
    for seen in on_two(on_ranks.what_users_see_in_the_consistent_view, view="consistent"):
        assert seen["the model is global"]
        assert seen["the loss is local"]
        assert seen["a reduced loss is local"]
        assert "before to_global()" in seen["global before"]
        assert "prepared already" in seen["prepared twice"]


def test_dtypes_that_would_abort_the_process():
    for results in on_two(on_ranks.dtypes):
        for dtype in ("oneflow.float16", "oneflow.bfloat16", "oneflow.int8"):
            assert results[f"{dtype} sum"] == [2.0] * 3
            assert results[f"{dtype} min"] == results[f"{dtype} max"] == results[f"{dtype} broadcast"] == [1.0] * 3
        assert results["oneflow.bool sum"] == [2.0] * 3
        assert "no dtype int16" in results["int16"]
        assert "oneflow.float16" in results["float16 model"]
        assert results["float64 error"] < 1e-7  # its kernels take the rate as float32


def test_gradients_that_were_taken_away_are_missed():
    for said in on_two(on_ranks.gradients_taken_away):
        assert "set_to_none" in said

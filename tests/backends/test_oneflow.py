"""The OneFlow backend keeps every promise in both of its views, at world sizes 1, 2 and 3; below, what only it has."""

import oneflow_on_ranks as on_ranks
import pytest

import unidist
from unidist.testing import conformance, suite
from unidist_oneflow import VIEWS

ZOO = "unidist_oneflow.zoo"
test_mirrored = conformance("oneflow", zoo=ZOO, world_sizes=(1, 2, 3), view="mirrored")
# How a rank dies and what a checkpoint holds does not depend on the view, so that is done once ...
test_consistent = conformance("oneflow", zoo=ZOO, world_sizes=(1, 2, 3), one_launch=True, view="consistent")


def test_consistent_view_resumes_on_another_number_of_ranks():  # ... but for this
    suite.resume(suite.Configuration("oneflow", ZOO, 3, (("view", "consistent"),)), 2)


def on_two(function, **options):
    """What each of two ranks gave back."""
    return unidist.launch(function, nproc=2, backend="oneflow", quiet=True, **options)


@pytest.fixture(scope="module")
def mirrored(tmp_path_factory):
    return on_two(on_ranks.in_mirrored_view, args=(str(tmp_path_factory.mktemp("mirrored") / "saved"),))


@pytest.fixture(scope="module")
def consistent(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("consistent") / "saved")
    return on_two(on_ranks.in_consistent_view, args=(folder,), view="consistent")


@pytest.fixture(scope="module")
def without_graph():
    return on_two(on_ranks.without_graph, view="consistent", graph=False)


def test_both_views_compiled_or_not_give_one_curve(mirrored, consistent, without_graph):
    for results in (*consistent, *without_graph):
        assert results["curve"] == pytest.approx(mirrored[0]["curve"], abs=2e-6)


def test_model_that_cannot_be_traced_runs_eagerly_and_says_why(mirrored, consistent):
    (losses, said), (_, quiet) = (results["untraceable"] for results in consistent)
    assert losses == pytest.approx(mirrored[0]["curve"], abs=2e-6)
    assert said.count("runs eagerly, because nn.Graph cannot trace it") == 1
    assert quiet == ""


def test_consistent_view_shows_plain_values(consistent):
    for results in consistent:
        seen = results["seen"]
        assert seen["the model is global"]
        assert seen["the loss is local"]
        assert seen["a reduced loss is local"]
        assert "before to_global()" in seen["global before"]
        assert "prepared already" in seen["prepared twice"]


def test_batch_normalisation_counts_its_batches(consistent, without_graph):
    assert [results["batches tracked"] for results in (*consistent, *without_graph)] == [3] * 4


def test_layer_that_changes_its_mode_is_traced_again(consistent):
    assert [results["modes"] for results in consistent] == [0.0, 0.0]


def test_dropout_resumes(mirrored, consistent):
    for results in (*mirrored, *consistent):
        losses, resumed = results["dropout"]
        assert losses == resumed
        assert len(set(losses)) == 3


def test_dtypes_that_would_abort_the_process(mirrored, consistent):
    for results in (each["dtypes"] for each in (*mirrored, *consistent)):
        for dtype in ("oneflow.float16", "oneflow.bfloat16", "oneflow.int8"):
            assert results[f"{dtype} sum"] == [2.0] * 3
            assert results[f"{dtype} min"] == results[f"{dtype} max"] == results[f"{dtype} broadcast"] == [1.0] * 3
        assert results["oneflow.bool sum"] == [2.0] * 3
        assert "no dtype int16" in results["int16"]
        assert "oneflow.float16" in results["float16 model"]
        assert results["float64 error"] < 1e-7  # its kernels take the rate as float32
    assert [each["dtypes"]["frozen float16"] for each in mirrored] == ["not refused"] * 2
    for results in consistent:
        assert "use float32, or view='mirrored'" in results["dtypes"]["frozen float16"]


def test_gradients_that_were_taken_away_are_missed(mirrored, consistent):
    for results in (*mirrored, *consistent):
        for said in results["gradients taken away"]:
            assert "set_to_none" in said


def test_gradients_changed_in_the_middle_of_a_group_are_noticed(mirrored, consistent):
    for results in (*mirrored, *consistent):
        for how, said in results["gradients changed"].items():
            expected = "not refused" if how in ("nothing", "looking") else "in the middle of an accumulation group"
            assert expected in said, how


def test_steps_that_nobody_waits_for_take_no_more_memory(mirrored, consistent):
    for results in (*mirrored, *consistent):
        early, late = results["memory"]
        # In pages. The queue itself holds up to 256 steps, of some 5 to 14 pages each, and may be empty at one of the
        # two moments and full at the other. Without a bound, 6,000 steps take 30,000 pages and more.
        assert late - early < 5000


@pytest.mark.parametrize("where", ["all", "all, then one"])
def test_batches_that_come_to_differ_train_the_same(where):
    mirrored, consistent = (on_two(on_ranks.batches_that_come_to_differ, args=(where,), view=v) for v in VIEWS)
    for results in (mirrored[1], *consistent):
        assert results == pytest.approx(mirrored[0], abs=2e-6)


def test_batch_that_differs_on_one_rank_alone_is_refused_in_the_consistent_view():
    with pytest.raises(unidist.errors.LaunchError, match=r"rank 1 comes to step 4 with a batch of another shape"):
        on_two(on_ranks.batches_that_come_to_differ, args=("one",), view="consistent")


def test_parameters_frozen_or_unfrozen_too_late(mirrored, consistent):
    for results in (*mirrored, *consistent):
        frozen, unfrozen = results["frozen late"]
        assert "was frozen after prepare()" in frozen
        assert "was unfrozen after prepare()" in unfrozen
        for said, what in zip(
            results["changed deep inside"], ("unfrozen", "unfrozen", "frozen", "frozen"), strict=True
        ):
            assert f"parameter 17.{'weight' if 'weight' in said else 'bias'} was {what} after prepare()" in said
        assert "nothing to optimize" in results["nothing to train"]


@pytest.mark.parametrize("what", ["two steps", "two models"])
def test_both_views_train_the_same(mirrored, consistent, what):
    for results in (mirrored[1], *consistent):
        assert results[what] == pytest.approx(mirrored[0][what], abs=2e-6)


@pytest.mark.parametrize("what", ["a tensor without axes", "rows that differ", "a named tuple"])
def test_both_views_train_the_same_on_odd_batches(mirrored, consistent, what):
    for results in (mirrored[1], *consistent):
        assert results["odd batches"][what] == pytest.approx(mirrored[0]["odd batches"][what], abs=2e-6)


@pytest.mark.parametrize("kind", on_ranks.OPTIMIZERS)
def test_both_views_update_the_same(mirrored, consistent, kind):
    for results in (each["optimizers"][kind] for each in (*mirrored, *consistent)):
        assert results.after == pytest.approx(mirrored[0]["optimizers"][kind].after, abs=2e-6)
        assert results.after == results.resumed
        assert not any(a == b for a, b in zip(results.before, results.after, strict=True))


@pytest.mark.parametrize("kind", on_ranks.OPTIMIZERS)
def test_an_update_is_a_part_of_the_graph_where_it_can(consistent, kind):
    for results in (each["optimizers"][kind] for each in consistent):
        assert results.traced == 1
        assert results.gradients_seen == (kind in ("amsgrad", "rmsprop"))


def test_control_c_is_a_keyboard_interrupt(mirrored):
    assert [results["interrupted"] for results in mirrored] == [True, True]


def test_samplers_of_a_data_loader(mirrored):
    for rank, (own, wrong, subset) in enumerate(each["data loaders"] for each in mirrored):
        assert own == list(range(10))
        assert f"says rank {1 - rank} of 2, this is rank {rank} of 2" in wrong
        assert "SubsetRandomSampler" in subset

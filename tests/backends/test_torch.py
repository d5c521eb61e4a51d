"""The torch backend keeps every promise at world sizes 1, 2 and 3; below, what only it has."""

import os
from pathlib import Path

import pytest

import on_ranks
import unidist
from project import ROOT
from unidist.errors import UsageError
from unidist.testing import Configuration, conformance, run
from unidist.testing.suite import report
from unidist.world import World
from unidist_torch.devices import pick_device, pick_transport

test_promises = conformance("torch", zoo="unidist_torch.zoo", world_sizes=(1, 2, 3))


TORCH_MODELS = (  # of torch_checks.py, for every backend that trains torch models
    "stray_gradient_of_any_layer",
    "gradients_of_any_layer_touched_in_a_group",
    "gradients_of_any_layer_cleared_before_the_update",
    "gradients_of_any_layer_cleared_before_a_flush",
    "optimizer_of_a_part_of_the_model",
    "parameter_without_a_gradient",
    "parameters_that_are_used_in_unusual_ways",
    "everything_frozen_and_one_layer_thawed",
    "thawed_and_prepared_again",
    "models_and_optimizers_that_prepare_refuses",
    "clipping_of_the_loops_own",
    "clipping_of_gradients_that_are_not_complete",
)


TORCH_STATES = (  # of torch_state_checks.py
    "settings_that_an_optimizer_could_not_go_on_with",
    "state_that_an_optimizer_could_not_go_on_with",
    "every_optimizer_of_torch_goes_on_where_it_was",
    "modules_that_hold_more_than_arrays",
    "two_arrays_for_one_of_the_model",
    "batch_normalisation_without_its_count",
)


def further_check(names, name, *options, zoo="torch_checks"):
    path = os.pathsep.join([str(Path(__file__).parent), str(ROOT)])
    report(run(Configuration("torch", zoo, 2, options, environment=(("PYTHONPATH", path),)), names)[name])


@pytest.mark.parametrize("name", TORCH_MODELS)
def test_beyond_the_promises(name):
    further_check(TORCH_MODELS, name)


@pytest.mark.parametrize("name", TORCH_STATES)
def test_what_torch_keeps(name):
    further_check(TORCH_STATES, name, zoo="torch_state_checks")


def test_static_graph():
    name = "static_graph_without_an_exchange_in_each_backward"
    further_check((name,), name, ("static_graph", "true"))


def test_native_training_after_the_strategy():
    assert unidist.launch(on_ranks.native_training_after_the_strategy, 2, "torch") == [True, True]


def test_ranks_that_went_apart_are_told_when_they_leave(capsys):
    unidist.launch(on_ranks.ranks_that_went_apart, 2, "torch")
    assert (
        "the parameters of model 1 (in the order of prepare) of rank 1 differ from rank 0's" in capsys.readouterr().err
    )


def on_node(local_rank: int, of: int) -> World:
    return World(rank=local_rank, world_size=of, local_rank=local_rank, local_world_size=of)


@pytest.mark.parametrize(
    ("asked", "gpus", "local_rank", "visible", "device"),
    [
        (None, 0, 1, None, "cpu"),
        (None, 4, 2, None, "cuda:2"),
        ("cpu", 4, 2, None, "cpu"),
        ("cuda", 4, 3, None, "cuda:3"),
        ("gpu", 4, 3, None, "cuda:3"),
        ("cuda:1", 4, 3, None, "cuda:1"),
        (None, 2, 1, "5,7", "cuda:1"),  # torch counts the visible ones only
        (None, 1, 3, "6", "cuda:0"),  # each process was given a GPU of its own
    ],
)
def test_device_of_a_process(asked, gpus, local_rank, visible, device):
    assert pick_device(asked, gpus, on_node(local_rank, 4), visible) == device


@pytest.mark.parametrize(
    ("asked", "gpus", "local_rank", "visible", "words"),
    [
        ("cuda", 0, 0, None, "sees no GPU"),
        ("cuda", 0, 0, "", r"CUDA_VISIBLE_DEVICES="),
        ("cuda:4", 4, 0, None, r"sees 4 GPU"),
        (None, 2, 2, "5,7", r"4 processes .* 2 GPU.*CUDA_VISIBLE_DEVICES=5,7"),
        ("tpu", 4, 0, None, "'tpu'"),
        ("cuda:x", 4, 0, None, "cuda:x"),
    ],
)
def test_device_that_cannot_be_had(asked, gpus, local_rank, visible, words):
    with pytest.raises(UsageError, match=words):
        pick_device(asked, gpus, on_node(local_rank, 4), visible)


def test_transport():
    assert pick_transport("auto", "cpu", {"gloo"}) == ("gloo", "chosen for cpu")
    assert pick_transport("auto", "cuda:1", {"gloo", "nccl"}) == ("nccl", "chosen for cuda")
    assert pick_transport("auto", "cuda:1", {"gloo"}) == ("gloo", "chosen for cuda")
    assert pick_transport("gloo", "cuda:1", {"gloo", "nccl"}) == ("gloo", "asked for")
    with pytest.raises(UsageError, match=r"mpi.*only gloo.*built from source"):
        pick_transport("mpi", "cpu", {"gloo"})
    with pytest.raises(UsageError, match="GPU memory only"):
        pick_transport("nccl", "cpu", {"gloo", "nccl"})


def test_unimportant_gradients_wait_and_nothing_is_lost():
    for difference, something_waits in unidist.launch(on_ranks.largest_parts_lose_nothing, nproc=2, backend="torch"):
        assert difference < 1e-5
        assert something_waits


def test_data_loaders_with_samplers():
    for rank, (own, wrong, weighted) in enumerate(unidist.launch(on_ranks.data_loaders_taken_over, 2, "torch")):
        assert own == list(range(10)), "each sample once, where DistributedSampler would repeat"
        assert f"says rank {1 - rank} of 2, this is rank {rank} of 2" in wrong
        assert "WeightedRandomSampler" in weighted


@pytest.mark.parametrize("kind", ["powersgd", "topk", "fp16"])
def test_compression_of_several_buckets(kind):
    assert unidist.launch(on_ranks.many_buckets, 2, "torch", (kind,)) == [0.0, 0.0]


def test_streams_that_do_not_tell_their_size_or_split_themselves():
    for elements, seen in unidist.launch(on_ranks.odd_streams, 2, "torch"):
        assert elements == [2, 2, 2]
        assert seen == list(range(16))


def test_models_that_a_wrapper_around_the_loss_could_trip_over():
    for told in unidist.launch(on_ranks.unusual_models, 2, "torch"):
        assert told["apart"] == {"weights": 0.0, "center": 0.0}
        assert told["moved"]
        assert "gradient" in told["detached"]
        assert told["hooks"]

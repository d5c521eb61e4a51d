"""The torch backend keeps every promise at world sizes 1, 2 and 3; below, what only it has."""

import pytest

import on_ranks
import unidist
from unidist.errors import UsageError
from unidist.testing import conformance
from unidist.world import World
from unidist_torch.devices import pick_device, pick_transport

test_promises = conformance("torch", zoo="unidist_torch.zoo", world_sizes=(1, 2, 3))


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
    for weights, seen in unidist.launch(on_ranks.odd_streams, 2, "torch"):
        assert weights == [1.0, 1.0, 1.0]
        assert seen == list(range(16))

"""What is said in the call: `init`, `rank` and `world_size`, with and against the environment."""

from __future__ import annotations

from typing import Any

import pytest

from launcher_variables import OPENMPI, PLAIN, SLURM, TORCHRUN
from unidist.errors import WorldError
from unidist.world import World, detect


def test_tcp() -> None:
    world = detect({}, init="tcp://127.0.0.1:22225", rank=1, world_size=3)
    assert world == World(
        1, 3, 1, 3, 0, 1, "worker", "127.0.0.1", 22225, "tcp", "init='tcp://127.0.0.1:22225' was given"
    )
    assert detect({}, init="tcp://10.0.0.1:1", rank=1, world_size=3).local_rank == 0
    assert detect({}, init="tcp://[::1]:1", rank=1, world_size=3).master_addr == "::1"
    assert detect({"LOCAL_RANK": "2"}, init="tcp://10.0.0.1:1", rank=1, world_size=3).local_rank == 2


def test_arguments_win_over_a_contradicting_environment() -> None:
    assert detect({"RANK": "7"}, init="tcp://h0:1", rank=1, world_size=3).rank == 1
    world = detect(PLAIN | {"RANK": "7"}, rank=1, world_size=3)
    assert (world.rank, world.world_size, world.master_port, world.source) == (1, 3, 29500, "arguments")


def test_arguments_complete_an_environment() -> None:
    world = detect(SLURM, rank=0)
    assert (world.rank, world.world_size, world.master_addr) == (0, 6, "h0")
    assert detect(PLAIN, init="env://") == detect(PLAIN)
    assert detect({}, rank=0, world_size=1).world_size == 1


def test_minus_one_means_from_the_environment() -> None:
    """As torch's scripts pass it: `--rank -1 --world-size -1`, with or without init."""
    for env in (SLURM, PLAIN, TORCHRUN, OPENMPI, {}):
        assert detect(env, rank=-1, world_size=-1) == detect(env)
        assert detect(env, init="env://", rank=-1, world_size=-1) == detect(env)
    assert detect(PLAIN, rank=-1, world_size=9).rank == detect(PLAIN).rank
    assert detect(PLAIN, rank=0, world_size=-1).world_size == detect(PLAIN).world_size
    world = detect(SLURM, init="tcp://h1:1234", rank=-1, world_size=-1)
    assert (world.rank, world.world_size, world.place) == (detect(SLURM).rank, 6, detect(SLURM).place)
    assert (world.master_addr, world.master_port) == ("h1", 1234)
    assert "rank and world_size from slurm" in world.reason
    meeting = {"MASTER_ADDR": "h0", "MASTER_PORT": "1234"}
    for env, arguments in (({"RANK": "1"}, (-1, 3)), ({"WORLD_SIZE": "3"}, (1, -1))):
        world = detect(env | meeting, rank=arguments[0], world_size=arguments[1])
        assert (world.rank, world.world_size, world.master_addr) == (1, 3, "h0")


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        ({"init": "tcp://h0:1"}, ["not rank and world_size"]),
        ({"init": "tcp://h0:1", "rank": 0}, ["not world_size"]),
        ({"init": "file:///x", "world_size": 2}, ["not rank"]),
        ({"init": "tcp://h0:1", "rank": 2, "world_size": 2}, ["rank is 2", "world_size is 2"]),
        ({"init": "tcp://h0:1", "rank": -2, "world_size": 2}, ["rank is -2"]),
        ({"init": "tcp://h0:1", "rank": -1, "world_size": -1}, ["not rank and world_size"]),
        ({"init": "tcp://h0:1", "rank": -1, "world_size": 2}, ["not rank,"]),
        ({"rank": 0, "world_size": -1}, ["rank=0 was given", "not world_size"]),
        ({"init": "tcp://h0:1", "rank": "0", "world_size": 2}, ["rank='0'", "whole numbers"]),
        ({"init": "tcp://h0", "rank": 0, "world_size": 2}, ["tcp://h0", "tcp://host:port"]),
        ({"init": "tcp://h0:x", "rank": 0, "world_size": 2}, ["tcp://host:port"]),
        ({"init": "tcp://h0:70000", "rank": 0, "world_size": 2}, ["65535"]),
        ({"init": "file://x", "rank": 0, "world_size": 2}, ["three slashes"]),
        ({"init": "nfs:///x", "rank": 0, "world_size": 2}, ["nfs:///x", "expected tcp://"]),
        ({"rank": 0}, ["rank=0 was given", "not world_size", "init="]),
        ({"world_size": 2}, ["not rank", "init="]),
        ({"rank": 0, "world_size": 2}, ["nowhere to meet", "init='tcp://host:port'"]),
    ],
)
def test_arguments_refused(arguments: dict[str, Any], texts: list[str]) -> None:
    with pytest.raises(WorldError) as caught:
        detect({}, **arguments)
    for text in texts:
        assert text in str(caught.value)

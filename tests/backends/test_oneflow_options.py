"""The cluster in OneFlow's words: what is understood, what is refused, and which node a host takes itself for."""

import os
import re
import socket
from dataclasses import replace

import pytest

from unidist import registry
from unidist.control import Control
from unidist.control.meeting import Peers
from unidist.errors import LaunchError, UnknownOption, UsageError, WorldError
from unidist.launch.plan import Job, plan
from unidist.world import World
from unidist_oneflow import OneFlowOptions, machines, preflight
from unidist_oneflow.devices import pick_device

TWO = [{"addr": "10.0.0.1"}, {"addr": "10.0.0.2"}]


@pytest.fixture
def addresses(monkeypatch):
    """Makes this host have these addresses."""

    def have(*own):
        monkeypatch.setattr(machines, "is_own", lambda address: address in own)
        monkeypatch.setattr(machines, "own_addresses", lambda: list(own))

    return have


@pytest.mark.parametrize("machine", [TWO, ["10.0.0.1", "10.0.0.2"], "10.0.0.1,10.0.0.2", "10.0.0.1, 10.0.0.2"])
def test_spellings_of_a_machine_list(machine):
    assert OneFlowOptions(machine=machine) == OneFlowOptions(machine=TWO)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"machine": []}, "list of nodes"),
        ({"machine": [{"address": "10.0.0.1"}]}, '"addr"'),
        ({"machine": [7]}, "no address"),
        ({"ctrl_port": 0}, "1 to 65535"),
        ({"ctrl_port": "9988"}, "whole number"),
        ({"gpu_device_num": 0}, "gpu_device_num"),
        ({"machine": TWO, "node_rank": 2}, "nodes 0 to 1"),
        ({"view": "mirored"}, "mirrored, consistent"),
        ({"graph": "yes"}, "true or false"),
    ],
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(UsageError, match=words):
        OneFlowOptions(**options)


def test_a_misspelt_option_is_answered_with_the_right_one():
    with pytest.raises(UnknownOption, match="'ctrl_port'"):
        registry.build_options(registry.plugin("oneflow"), {"ctrl_prot": 9988})


def test_a_host_finds_itself_by_its_address(addresses):
    addresses("127.0.0.1", "10.0.0.2")
    world = machines.place(World(0, 1), OneFlowOptions(machine=TWO, ctrl_port=9988))
    assert (world.rank, world.world_size, world.node_rank, world.num_nodes) == (1, 2, 1, 2)
    assert (world.master_addr, world.master_port) == ("10.0.0.1", 9988)


def test_a_host_that_is_not_in_the_list(addresses):
    addresses("127.0.0.1", "10.0.0.7")
    with pytest.raises(WorldError, match=r"10\.0\.0\.1, 10\.0\.0\.2.*10\.0\.0\.7.*none.*node_rank.*--net=host"):
        machines.node_rank(OneFlowOptions(machine=TWO))


def test_a_host_that_is_in_the_list_twice(addresses):
    addresses("10.0.0.1", "10.0.0.2")
    with pytest.raises(WorldError, match="nodes 0, 1 match"):
        machines.node_rank(OneFlowOptions(machine=TWO))
    assert machines.node_rank(OneFlowOptions(machine=TWO, node_rank=1)) == 1


def test_own_addresses_of_this_host():
    assert machines.own_addresses()[-1] == "127.0.0.1"
    assert machines.is_own("127.0.0.1")
    assert not machines.is_own("192.0.2.1")  # reserved for documentation
    with pytest.raises(WorldError, match="cannot resolve"):
        machines.is_own("no-such-host.invalid")


def test_what_a_launcher_said_must_agree(addresses):
    addresses("10.0.0.1")
    launched = World(0, 2, 0, 1, 0, 2, source="environment", reason="RANK and WORLD_SIZE are set")
    placed = machines.place(launched, OneFlowOptions(machine=TWO))
    assert placed == replace(launched, rivals=("10.0.0.2",))
    with pytest.raises(WorldError, match=r"started 2 processes.*describe 2 nodes x 4 = 8"):
        machines.place(launched, OneFlowOptions(machine=TWO, gpu_device_num=4))


def test_ctrl_port_is_where_the_ranks_of_a_launcher_meet():
    launched = World(0, 2, 0, 2, master_addr="127.0.0.1", master_port=5000, source="unidist", reason="")
    assert machines.place(launched, OneFlowOptions(ctrl_port=9988)).master_port == 9988
    assert machines.place(launched, OneFlowOptions()) is launched


@pytest.mark.parametrize("machine", [{}, {"machine": "127.0.0.1"}])
def test_two_numbers_of_processes(machine):
    options = {"gpu_device_num": 2, **machine}
    job = Job("oneflow", "python", ("python", "train.py"), nproc=1, options=options, ports=(5000,))
    with pytest.raises(LaunchError, match=r"--nproc is 1 and gpu_device_num is 2.*give --nproc 2"):
        plan(job, registry.plugin("oneflow"))


def test_plan_of_one_node_among_several(addresses):
    addresses("10.0.0.2")
    options = {"machine": "10.0.0.1,10.0.0.2", "ctrl_port": 9988}
    job = Job("oneflow", "python", ("python", "train.py"), nproc=2, options=options, ports=(5000,))
    workers = plan(job, registry.plugin("oneflow"))
    assert [worker.env["RANK"] for worker in workers] == ["2", "3"]
    assert [worker.env["UNIDIST_LOCAL_RANK"] for worker in workers] == ["0", "1"]
    for worker in workers:
        assert worker.env["UNIDIST_WORLD_SIZE"] == worker.env["WORLD_SIZE"] == "4"
        assert (worker.env["MASTER_ADDR"], worker.env["UNIDIST_MASTER_PORT"]) == ("10.0.0.1", "9988")
        assert worker.host == "10.0.0.2"


def test_an_interface_that_is_not_there(monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "virbr9")
    with pytest.raises(WorldError, match=r"virbr9.*lo"):
        preflight.check_interface(None, on_gpu=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    preflight.check_interface(None, on_gpu=False)


def test_an_interface_that_does_not_lead_to_the_other_nodes(monkeypatch):
    control = Control("tcp://127.0.0.1:1", "")
    two = Peers(
        control, 0, 2, ("h0", "h1"), ("127.0.0.1", "10.0.0.2"), "127.0.0.1", "lo", "", launched=False, host=None
    )
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "^lo")
    with pytest.raises(WorldError, match=r"\^lo.*lo, which leads to the other nodes"):
        preflight.check_interface(two, on_gpu=True)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    preflight.check_interface(two, on_gpu=True)
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"


def test_a_port_that_oneflow_cannot_have():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = preflight.try_port(port)[1]
    assert re.search(rf"port {port} .*Address already in use.*ctrl_port", said)
    assert preflight.try_port(port) == (port, None)


def test_device():
    world = World(1, 2, 1, 2)
    assert pick_device(None, 0, world) == "cpu"
    assert pick_device(None, 2, world) == "cuda:1"
    for asked, words in (("cuda", "0 GPU"), ("cuda:4", "0 GPU"), ("tpu", "'tpu'")):
        with pytest.raises(UsageError, match=words):
            pick_device(asked, 0, world)

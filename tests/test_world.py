"""Every cluster environment, whole, partial and contradictory."""

from __future__ import annotations

from typing import Any

import pytest

from launcher_variables import (
    DMLC,
    HOROVOD,
    MXJOB,
    OPENMPI,
    PLAIN,
    PYTORCHJOB,
    SLURM,
    SLURM_BATCH,
    TORCHRUN,
    TRAINJOB,
    UNIDIST,
    Env,
    mx_config,
)
from unidist.errors import WorldError
from unidist.world import World, detect, expand_hostlist, tasks_per_node

FOUND: dict[str, tuple[Env, dict[str, Any]]] = {
    "nothing": ({}, {"rank": 0, "world_size": 1, "source": "none"}),
    "unidist": (
        UNIDIST,
        {"rank": 3, "world_size": 4, "local_rank": 1, "local_world_size": 2, "node_rank": 1, "num_nodes": 2}
        | {"master_addr": "10.0.0.1", "master_port": 1234, "source": "unidist", "reason": "UNIDIST_RANK is set"},
    ),
    "a server of unidist's, beyond the workers": (
        UNIDIST | {"UNIDIST_ROLE": "server", "UNIDIST_RANK": "9", "UNIDIST_LOCAL_RANK": "9"},
        {"rank": 9, "role": "server", "world_size": 4},
    ),
    "torchrun": (
        TORCHRUN,
        {"rank": 5, "world_size": 6, "local_rank": 2, "local_world_size": 3, "node_rank": 1, "num_nodes": 2}
        | {"master_addr": "h0", "master_port": 29500, "source": "torchrun", "reason": "TORCHELASTIC_RUN_ID is set"},
    ),
    "horovodrun": (
        HOROVOD,
        {"rank": 1, "local_rank": 0, "node_rank": 1, "num_nodes": 2, "master_addr": None, "source": "horovod"},
    ),
    "horovodrun with a master": (
        HOROVOD | {"MASTER_ADDR": "h0", "MASTER_PORT": "1"},
        {"master_addr": "h0", "master_port": 1},
    ),
    "an MXNet worker": (
        DMLC,
        {"rank": -1, "world_size": 2, "local_rank": -1, "local_world_size": 2, "role": "worker", "source": "dmlc"}
        | {"master_addr": "127.0.0.1", "master_port": 9091},
    ),
    "an MXNet worker with a number": (
        DMLC | {"DMLC_WORKER_ID": "1"},
        {"rank": 1, "local_rank": 1, "local_world_size": 2},
    ),
    "an MXNet worker in a pod": (
        DMLC | {"DMLC_PS_ROOT_URI": "job-scheduler-0", "DMLC_WORKER_ID": "1"},
        {"rank": 1, "local_rank": 0, "node_rank": 1, "num_nodes": 2},
    ),
    "an MXNet scheduler": (DMLC | {"DMLC_ROLE": "scheduler"}, {"rank": -1, "role": "scheduler"}),
    "a worker of MXNet's launch.py, local": (
        DMLC | {"DMLC_PS_ROOT_URI": "10.0.0.1", "DMLC_TASK_ID": "1", "DMLC_JOB_CLUSTER": "local"},
        {"rank": 1, "local_rank": 1, "local_world_size": 2, "num_nodes": 1},
    ),
    "a server of MXNet's launch.py, numbered after the workers": (
        DMLC | {"DMLC_ROLE": "server", "DMLC_TASK_ID": "2", "DMLC_JOB_CLUSTER": "local"},
        {"rank": -1, "role": "server"},
    ),
    "a worker of an MXJob": (
        MXJOB,
        {
            "rank": 1,
            "local_rank": 0,
            "node_rank": 1,
            "num_nodes": 2,
            "reason": "DMLC_ROLE is worker and MX_CONFIG is set",
        },
    ),
    "a server of an MXJob": (
        MXJOB | {"DMLC_ROLE": "server"} | mx_config(task={"type": "server", "index": 0}),
        {"rank": -1, "role": "server"},
    ),
    "mpirun on one host": (
        OPENMPI,
        {"rank": 1, "local_rank": 1, "local_world_size": 2, "master_addr": "127.0.0.1", "source": "openmpi"},
    ),
    "mpirun on two hosts": (
        OPENMPI
        | {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
        | {"MASTER_ADDR": "h0", "MASTER_PORT": "7"},
        {"local_rank": 0, "node_rank": 1, "num_nodes": 2, "master_addr": "h0", "master_port": 7},
    ),
    "mpirun inside an allocation, whose daemons srun has started": (SLURM | OPENMPI, {"rank": 1, "source": "openmpi"}),
    "a Slurm task, unevenly spread": (
        SLURM,
        {"rank": 5, "world_size": 6, "local_rank": 0, "local_world_size": 1, "node_rank": 2, "num_nodes": 3}
        | {"master_addr": "h0", "source": "slurm", "reason": "SLURM_STEP_ID is set"},
    ),
    "a Slurm task with a master": (
        SLURM | {"MASTER_ADDR": "ib0", "MASTER_PORT": "4000"},
        {"master_addr": "ib0", "master_port": 4000},
    ),
    "a Slurm task on one host": (
        SLURM
        | {"SLURM_STEP_NODELIST": "h1", "SLURM_STEP_TASKS_PER_NODE": "6"}
        | {"SLURM_NODEID": "0", "SLURM_LOCALID": "5"},
        {"local_rank": 5, "local_world_size": 6, "master_addr": "127.0.0.1"},
    ),
    "a Slurm batch script": (SLURM_BATCH, {"world_size": 1, "source": "none"}),
    "PyTorchJob": (
        PYTORCHJOB,
        {"rank": 1, "world_size": 3, "local_rank": 0, "local_world_size": 1, "node_rank": 1, "num_nodes": 3}
        | {"master_addr": "job-master-0", "master_port": 23456, "source": "kubeflow", "reason": "PET_NODE_RANK is set"},
    ),
    "PyTorchJob of an operator before PET_*": (
        {k: v for k, v in PYTORCHJOB.items() if not k.startswith("PET_")},
        {"rank": 1, "local_rank": 0, "node_rank": 1, "num_nodes": 3, "source": "environment"},
    ),
    "processes that a script started inside a pod": (
        PYTORCHJOB
        | {"PET_NPROC_PER_NODE": "2", "RANK": "3", "WORLD_SIZE": "6"}
        | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
        {"rank": 3, "local_rank": 1, "node_rank": 1, "num_nodes": 3, "source": "environment"},
    ),
    "TrainJob": (
        TRAINJOB,
        {"rank": 1, "world_size": 2, "master_addr": "job-node-0-0.job", "master_port": 29400, "source": "kubeflow"},
    ),
    "torchrun inside a pod": (TRAINJOB | TORCHRUN, {"rank": 5, "source": "torchrun"}),
    "RANK and WORLD_SIZE": (
        PLAIN,
        {"rank": 1, "local_rank": 1, "local_world_size": 2, "num_nodes": 1, "source": "environment"},
    ),
    "RANK and WORLD_SIZE across hosts": (
        PLAIN | {"MASTER_ADDR": "10.0.0.1"},
        {"local_rank": 0, "local_world_size": 1, "node_rank": 1, "num_nodes": 2},
    ),
    "oneflow.distributed.launch across hosts, which does not tell the local size": (
        PLAIN | {"MASTER_ADDR": "10.0.0.1", "LOCAL_RANK": "1"},
        {"local_rank": 1, "local_world_size": 0, "node_rank": -1, "num_nodes": 0},
    ),
    "one process by RANK and WORLD_SIZE": ({"RANK": "0", "WORLD_SIZE": "1"}, {"master_addr": None}),
    "what OneFlow's import leaves behind": ({"RANK": "-1", "WORLD_SIZE": "1"}, {"rank": 0, "source": "none"}),
    "empty is unset": ({"RANK": "", "WORLD_SIZE": " "}, {"source": "none"}),
    "a master alone": ({"MASTER_ADDR": "h0", "MASTER_PORT": "1"}, {"source": "none", "master_addr": None}),
}


def pick(world: World, names: dict[str, Any]) -> dict[str, Any]:
    return {name: getattr(world, name) for name in names}


@pytest.mark.parametrize("case", FOUND)
def test_environment(case: str) -> None:
    env, expected = FOUND[case]
    assert pick(detect(env), expected) == expected


def test_precedence() -> None:
    # Without the local ranks of the later ones, so that each layer alone is what decides.
    layers = [PLAIN, TRAINJOB, SLURM, OPENMPI, DMLC, HOROVOD, TORCHRUN, UNIDIST]
    env: Env = {}
    sources = []
    for layer in layers:
        env = env | layer
        sources.append(detect(env).source)
    assert sources == [
        "environment", "kubeflow", "slurm", "openmpi", "dmlc", "horovod", "torchrun", "unidist",
    ]  # fmt: skip
    assert detect(env, init="tcp://h9:1", rank=0, world_size=2).source == "tcp"


REFUSED: dict[str, tuple[Env, list[str]]] = {
    "RANK alone": ({"RANK": "1"}, ["WORLD_SIZE is not set", "unset RANK (now '1')"]),
    "WORLD_SIZE alone": ({"WORLD_SIZE": "2"}, ["RANK is not set", "unset WORLD_SIZE"]),
    "rank too large": (PLAIN | {"RANK": "2"}, ["RANK is 2", "WORLD_SIZE is 2"]),
    "rank negative": (PLAIN | {"RANK": "-1"}, ["RANK is '-1'", "whole number"]),
    "rank no number": (PLAIN | {"RANK": "x"}, ["RANK is 'x'"]),
    "size zero": (PLAIN | {"RANK": "0", "WORLD_SIZE": "0"}, ["WORLD_SIZE is 0"]),
    "no master": ({"RANK": "1", "WORLD_SIZE": "2"}, ["MASTER_ADDR is not set"]),
    "no master port": (PLAIN | {"MASTER_PORT": ""}, ["MASTER_PORT is not set"]),
    "only a master port": (PLAIN | {"MASTER_ADDR": ""}, ["MASTER_ADDR is not set", "MASTER_PORT is 29500"]),
    "port no number": (PLAIN | {"MASTER_PORT": "http"}, ["MASTER_PORT is 'http'"]),
    "port out of range": (PLAIN | {"MASTER_PORT": "65536"}, ["MASTER_PORT is 65536", "65535"]),
    "port zero": (PLAIN | {"MASTER_PORT": "0"}, ["MASTER_PORT is 0"]),
    "local rank too large": (
        PLAIN | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"},
        ["LOCAL_RANK is 1", "LOCAL_WORLD_SIZE is 1"],
    ),
    "unidist, partial": ({"UNIDIST_RANK": "0"}, ["UNIDIST_WORLD_SIZE is not set", "unidist run"]),
    "unidist, without RANK": ({"UNIDIST_WORLD_SIZE": "2"}, ["UNIDIST_RANK is not set"]),
    "unidist, bad port": (UNIDIST | {"UNIDIST_MASTER_PORT": "x"}, ["UNIDIST_MASTER_PORT is 'x'"]),
    "torchrun, partial": ({"TORCHELASTIC_RUN_ID": "1"}, ["RANK is not set", "TORCHELASTIC_RUN_ID"]),
    "torchrun, local": (TORCHRUN | {"LOCAL_RANK": "3"}, ["LOCAL_RANK is 3", "LOCAL_WORLD_SIZE is 3"]),
    "horovod, partial": ({"HOROVOD_RANK": "0"}, ["HOROVOD_SIZE is not set", "horovodrun"]),
    "dmlc, role": (DMLC | {"DMLC_ROLE": "boss"}, ["DMLC_ROLE is 'boss'", "scheduler"]),
    "dmlc, no root": (DMLC | {"DMLC_PS_ROOT_URI": ""}, ["DMLC_PS_ROOT_URI is not set"]),
    "dmlc, no port": (DMLC | {"DMLC_PS_ROOT_PORT": ""}, ["DMLC_PS_ROOT_PORT is not set"]),
    "dmlc, no servers": (DMLC | {"DMLC_NUM_SERVER": ""}, ["DMLC_NUM_SERVER is not set"]),
    "mxjob, role": (MXJOB | {"DMLC_ROLE": "server"}, ["DMLC_ROLE", "'server'", "MX_CONFIG says 'worker'"]),
    "mxjob, workers": (MXJOB | {"DMLC_NUM_WORKER": "3"}, ["DMLC_NUM_WORKER: 3", "MX_CONFIG says 2"]),
    "mxjob, servers": (MXJOB | {"DMLC_NUM_SERVER": "2"}, ["DMLC_NUM_SERVER: 2", "MX_CONFIG says 1"]),
    "mxjob, scheduler": (MXJOB | {"DMLC_PS_ROOT_PORT": "1"}, ["DMLC_PS_ROOT_PORT", "job-scheduler-0"]),
    "mxjob, index": (MXJOB | mx_config(task={"type": "worker", "index": 2}), ["task.index in MX_CONFIG is 2"]),
    "mxjob, worker id": (MXJOB | {"DMLC_WORKER_ID": "0"}, ["DMLC_WORKER_ID is 0", "MX_CONFIG is 1"]),
    "mxjob, no task": (MXJOB | {"MX_CONFIG": '{"cluster": {}}'}, ["MX_CONFIG cannot be read", "task"]),
    "mxjob, no JSON": (MXJOB | {"MX_CONFIG": "worker"}, ["MX_CONFIG cannot be read"]),
    "dmlc, worker id": (DMLC | {"DMLC_WORKER_ID": "2"}, ["DMLC_WORKER_ID is 2", "DMLC_NUM_WORKER is 2"]),
    "mpirun on two hosts, no master": (
        OPENMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
        ["MASTER_ADDR is not set", "mpirun -x MASTER_ADDR="],
    ),
    "mpirun, no job": (OPENMPI | {"OMPI_MCA_ess_base_jobid": ""}, ["mpirun -x MASTER_PORT="]),
    "slurm, sizes": (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, ["SLURM_STEP_TASKS_PER_NODE is '2(x2)'"]),
    "slurm, unreadable": (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "two"}, ["'two'"]),
    "slurm, local": (SLURM | {"SLURM_LOCALID": "1"}, ["SLURM_LOCALID is 1", "SLURM_STEP_TASKS_PER_NODE is 1"]),
    "slurm, node": (SLURM | {"SLURM_NODEID": "3"}, ["SLURM_NODEID is 3", "SLURM_STEP_NODELIST is 3"]),
    "a pod that should run several": (
        PYTORCHJOB | {"PET_NPROC_PER_NODE": "2", "WORLD_SIZE": "6"},
        ["PET_NPROC_PER_NODE is 2", "with torchrun inside the pod"],
    ),
    "an elastic pod": (TRAINJOB | {"PET_NNODES": "1:4"}, ["PET_NNODES is 1:4", "torchrun"]),
    "a pod at odds with itself": (PYTORCHJOB | {"WORLD_SIZE": "6"}, ["WORLD_SIZE is 6", "PET_NNODES is 3"]),
    "a pod without a master": (TRAINJOB | {"PET_MASTER_ADDR": "", "PET_MASTER_PORT": ""}, ["PET_MASTER_ADDR"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_environment_refused(case: str) -> None:
    env, texts = REFUSED[case]
    with pytest.raises(WorldError) as caught:
        detect(env)
    for text in texts:
        assert text in str(caught.value)


def test_only_rank_0_of_the_workers_is_main() -> None:
    assert detect({}).is_main
    assert not detect(PLAIN).is_main
    assert not detect(UNIDIST | {"UNIDIST_ROLE": "server", "UNIDIST_RANK": "0"}).is_main


def test_derived_ports_differ_between_jobs_and_agree_within_one() -> None:
    def slurm(**change: str) -> int | None:
        return detect(SLURM | change).master_port

    assert slurm() == slurm(SLURM_PROCID="4", SLURM_NODEID="1")
    assert len({slurm(), slurm(SLURM_JOB_ID="18"), slurm(SLURM_STEP_ID="4")}) == 3
    assert detect(OPENMPI).master_port != detect(OPENMPI | {"OMPI_MCA_ess_base_jobid": "3218341889"}).master_port


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("h1", ["h1"]),
        ("h[0-2,5],g1", ["h0", "h1", "h2", "h5", "g1"]),
        ("n[008-011]", ["n008", "n009", "n010", "n011"]),
        ("r[1-2]n[0-1]-ib", ["r1n0-ib", "r1n1-ib", "r2n0-ib", "r2n1-ib"]),
        ("a-b.c,d", ["a-b.c", "d"]),
    ],
)
def test_expand_hostlist(text: str, hosts: list[str]) -> None:
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize("text", ["", "h[0-", "h[a]", "h[1-]"])
def test_unreadable_hostlist(text: str) -> None:
    with pytest.raises(WorldError, match="list of hosts"):
        expand_hostlist(text)


def test_tasks_per_node() -> None:
    assert tasks_per_node("4,1(x2)") == [4, 1, 1]
    assert tasks_per_node("2(x2)") == [2, 2]

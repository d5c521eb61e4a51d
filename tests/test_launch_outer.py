"""`unidist run` where another launcher has started it in several places: no separate jobs without a word."""

from __future__ import annotations

import pytest

import unidist
from launch_support import RUN, Place
from launcher_variables import DMLC, HOROVOD, MXJOB, OPENMPI, PLAIN, PYTORCHJOB, SLURM, SLURM_BATCH, TORCHRUN, TRAINJOB
from unidist.errors import UsageError
from unidist.launch.outer import refuse_several

CLASSIC = {name: value for name, value in PYTORCHJOB.items() if not name.startswith("PET_")}
SEVERAL = {
    "a task of srun": (SLURM, "SLURM_STEP_TASKS_PER_NODE=4,1(x2)", "`srun … python train.py`"),
    "one task on each node": (
        SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1(x3)"}, "SLURM_STEP_NODELIST=h[0-2]", "`srun … python train.py`",
    ),
    "mpirun": (OPENMPI, "OMPI_COMM_WORLD_SIZE=2", "`mpirun … python train.py`"),
    "a pod of a PyTorchJob": (PYTORCHJOB, "PET_NNODES=3, PET_NODE_RANK=1", "`python train.py` in each pod"),
    "one before PET_*": (CLASSIC, "WORLD_SIZE=3, RANK=1, MASTER_ADDR=job-master-0", "`python train.py` in each"),
    "a pod of a TrainJob": (TRAINJOB, "PET_NNODES=2", "`torchrun train.py`"),
    "an elastic pod": (TRAINJOB | {"PET_NNODES": "1:3"}, "PET_NNODES=1:3", "`torchrun train.py`"),
    "a pod of an MXJob": (MXJOB | {"DMLC_NUM_WORKER": "1"}, "DMLC_ROLE=worker", "`python train.py` in each role"),
    "launch.py": (DMLC, "DMLC_NUM_WORKER=2, DMLC_NUM_SERVER=1", "`python train.py`"),
    "torchrun": (TORCHRUN, "WORLD_SIZE=6, RANK=5", "`torchrun … train.py`"),
    "horovodrun": (HOROVOD, "HOROVOD_SIZE=2", "`horovodrun … python train.py`"),
    "torch's variables": (PLAIN, "WORLD_SIZE=2, RANK=1, MASTER_ADDR=127.0.0.1", "`python train.py`"),
}  # fmt: skip
ALONE = {
    "nothing": {},
    "the batch script of Slurm": SLURM_BATCH,
    "the only task of a step": SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_STEP_NUM_TASKS": "1"},
    "mpirun -np 1": OPENMPI | {"OMPI_COMM_WORLD_SIZE": "1"},
    "the only pod, of one process": PYTORCHJOB | {"PET_NNODES": "1", "WORLD_SIZE": "1"},
    "the only pod, of four processes": PYTORCHJOB | {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "4", "WORLD_SIZE": "4"},
    "torchrun of one process": TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"},
    "what OneFlow writes when it is imported": {"RANK": "-1", "WORLD_SIZE": "1"},
    "a master address without a size": {"MASTER_ADDR": "h0", "MASTER_PORT": "29500"},
    "a job inside a job of unidist": PLAIN | {"UNIDIST_RANK": "1", "UNIDIST_WORLD_SIZE": "2"},
}


@pytest.mark.parametrize("name", SEVERAL)
def test_one_of_several_is_refused(name: str) -> None:
    env, seen, instead = SEVERAL[name]
    with pytest.raises(UsageError) as caught:
        refuse_several(env, "train.py", "add --standalone")
    for words in (seen, instead, "add --standalone"):
        assert words in str(caught.value)


@pytest.mark.parametrize("name", ALONE)
def test_the_only_one_is_not(name: str) -> None:
    refuse_several(ALONE[name], "train.py", "add --standalone")


@pytest.mark.parametrize("name", ["a task of srun", "mpirun", "a pod of a PyTorchJob", "torch's variables"])
def test_run_in_a_pod_or_task_of_several(place: Place, name: str) -> None:
    script = place.script("print('trained', rank)")
    env, seen, _ = SEVERAL[name]
    for how in ((), ("--dry-run",)):
        refused = place.run(*RUN, "-n", "2", *how, script, **env)
        assert refused.code == 2, refused.out + refused.err
        assert seen in refused.err
        assert "--standalone" in refused.err
        assert refused.out == ""
    alone = place.run(*RUN, "-n", "2", "--standalone", script, **env)
    assert alone.code == 0, alone.err
    assert alone.out.count("trained") == 2


def test_launch_as_one_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in OPENMPI.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(UsageError, match=r"OMPI_COMM_WORLD_SIZE=2.*standalone=True"):
        unidist.launch(print, nproc=2, backend="torch")

"""What each launcher and cluster leaves in the environment of a process."""

from __future__ import annotations

import json

Env = dict[str, str]

UNIDIST: Env = {
    "UNIDIST_ROLE": "worker",
    "UNIDIST_RANK": "3",
    "UNIDIST_WORLD_SIZE": "4",
    "UNIDIST_LOCAL_RANK": "1",
    "UNIDIST_LOCAL_WORLD_SIZE": "2",
    "UNIDIST_NODE_RANK": "1",
    "UNIDIST_NUM_NODES": "2",
    "UNIDIST_MASTER_ADDR": "10.0.0.1",
    "UNIDIST_MASTER_PORT": "1234",
}
TORCHRUN: Env = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "5",
    "WORLD_SIZE": "6",
    "LOCAL_RANK": "2",
    "LOCAL_WORLD_SIZE": "3",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "h0",
    "MASTER_PORT": "29500",
}
HOROVOD: Env = {
    "HOROVOD_RANK": "1",
    "HOROVOD_SIZE": "2",
    "HOROVOD_LOCAL_RANK": "0",
    "HOROVOD_LOCAL_SIZE": "1",
    "HOROVOD_CROSS_RANK": "1",
    "HOROVOD_CROSS_SIZE": "2",
}


def mx_config(**changes: object) -> Env:
    cluster = {
        "scheduler": [{"url": "job-scheduler-0", "port": 9091}],
        "server": [{"url": "job-server-0", "port": 9091}],
        "worker": [{"url": "job-worker-0", "port": 9091}, {"url": "job-worker-1", "port": 9091}],
    }
    config = {"cluster": cluster, "labels": dict.fromkeys(cluster, ""), "task": {"type": "worker", "index": 1}}
    return {"MX_CONFIG": json.dumps({**config, **changes})}


DMLC: Env = {
    "DMLC_ROLE": "worker",
    "DMLC_PS_ROOT_URI": "127.0.0.1",
    "DMLC_PS_ROOT_PORT": "9091",
    "DMLC_NUM_SERVER": "1",
    "DMLC_NUM_WORKER": "2",
}
MXJOB: Env = {**DMLC, "DMLC_PS_ROOT_URI": "job-scheduler-0", "DMLC_USE_KUBERNETES": "1", **mx_config()}
OPENMPI: Env = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_ess_base_jobid": "3218276353",
}
SLURM_BATCH: Env = {
    "SLURM_JOB_ID": "17",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "6",
    "SLURM_JOB_NODELIST": "h[0-2]",
    "SLURM_TASKS_PER_NODE": "2(x3)",
}
SLURM: Env = SLURM_BATCH | {
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_NODELIST": "h[0-2]",
    "SLURM_STEP_TASKS_PER_NODE": "4,1(x2)",
    "SLURM_PROCID": "5",
    "SLURM_NODEID": "2",
}
PYTORCHJOB: Env = {
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "3",
    "RANK": "1",
    "PET_NPROC_PER_NODE": "auto",
    "PET_NODE_RANK": "1",
    "PET_NNODES": "3",
}
TRAINJOB: Env = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}
PLAIN: Env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}

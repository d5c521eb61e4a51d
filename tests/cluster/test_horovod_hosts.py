"""Horovod on three hosts: by horovodrun over ssh, by its variables set by hand, by srun and by mpirun."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hosts import MPI, SLURM, Hosts, curve, why_not

from unidist.launch.environments import interpreter_for

ROOT = Path(__file__).resolve().parents[2]
TRAIN = [str(ROOT / "examples" / "train.py"), "--epochs=3"]
PATIENCE = 300.0


def environment(hosts: Hosts) -> tuple[str, dict[str, str]]:
    python, variables = interpreter_for("horovod")
    path = os.pathsep.join([str(Path(hosts.ssh).parent), str(Path(python).parent), os.environ["PATH"]])
    return python, {**variables, "PATH": path, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def alone(hosts: Hosts) -> list[float]:
    """The losses of one process."""
    python, env = environment(hosts)
    ended = hosts[0].run([python, *TRAIN], env={**env, "UNIDIST_BACKEND": "horovod"}, timeout=PATIENCE)
    assert ended.returncode == 0, ended.stderr
    return curve(ended.stdout)


def test_horovodrun(hosts: Hosts, alone: list[float]) -> None:
    python, env = environment(hosts)
    launch = [python, "-m", "horovod.runner.launch", "--gloo", "-np", "3", "-H", "h0:1,h1:1,h2:1"]
    ended = hosts[0].run([*launch, "--network-interfaces", "eth0", python, *TRAIN], env=env, timeout=PATIENCE)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert curve(ended.stdout) == pytest.approx(alone, abs=1e-5)
    assert "3 processes on 3 nodes from horovod" in ended.stdout + ended.stderr


def test_variables_set_by_hand(hosts: Hosts, alone: list[float]) -> None:
    python, env = environment(hosts)
    common = {"SIZE": 3, "LOCAL_RANK": 0, "LOCAL_SIZE": 1, "CROSS_SIZE": 3, "GLOO_RENDEZVOUS_PORT": 29400}
    common["GLOO_RENDEZVOUS_ADDR"] = hosts[0].address
    ranks = []
    for rank in (2, 1, 0):
        own = {f"HOROVOD_{name}": str(value) for name, value in {**common, "RANK": rank, "CROSS_RANK": rank}.items()}
        ranks.append(hosts[rank].start([python, *TRAIN], env={**env, **own}))
    ends = [each.communicate(timeout=PATIENCE) for each in ranks]
    assert not any(each.returncode for each in ranks), ends
    assert curve("".join(output for output, _ in ends)) == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize("way", ["srun", "mpirun"])
def test_horovod_without_mpi_meets_wherever_unidist_finds_the_ranks(hosts: Hosts, alone: list[float], way: str) -> None:
    if reason := why_not(*(SLURM if way == "srun" else MPI)):
        pytest.skip(reason)
    python, env = environment(hosts)
    env |= {"UNIDIST_BACKEND": "horovod"}
    launch = ["srun", "-N3", "-n3"] if way == "srun" else [*hosts.mpirun(1), "-np", "3", "-x", "MASTER_ADDR=h0"]
    forward = ["env", *(f"{name}={value}" for name, value in env.items())]  # mpirun passes little on
    more = hosts.slurm() if way == "srun" else {}
    ended = hosts[0].run([*launch, *forward, python, *TRAIN], env=more, timeout=PATIENCE)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert curve(ended.stdout) == pytest.approx(alone, abs=1e-5)

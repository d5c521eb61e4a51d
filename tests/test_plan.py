"""The plan of a job is data: what it holds, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest

from unidist.backend import Plugin
from unidist.errors import LaunchError
from unidist.launch.plan import Job, Process, describe, inherited, plan
from unidist.launch.ports import Ports


@dataclass(frozen=True)
class NoOptions:
    pass


PLAIN = Plugin("plain", "nowhere:Backend", NoOptions, requires=())
JOB = Job("plain", "python", ("python", "a.py"), nproc=2, ports=(5000, 5001, 5002, 5003), token="secret")


def test_equal_workers_by_default() -> None:
    processes = plan(JOB, PLAIN)
    assert [process.name for process in processes] == ["worker 0", "worker 1"]
    assert [process.env["RANK"] for process in processes] == ["0", "1"]
    assert {process.env["MASTER_PORT"] for process in processes} == {"5000"}


def test_options_travel_as_json() -> None:
    options = {"machine": [{"addr": "10.0.0.1"}], "depth": 2, "mode": "a b"}
    assert json.loads(plan(replace(JOB, options=options), PLAIN)[0].env["UNIDIST_OPTIONS"]) == options


def test_what_a_role_says_wins() -> None:
    job = replace(JOB, env={"A": "job", "B": "job"})
    declared = replace(
        PLAIN, plan=lambda job: [Process("worker", r, job.command, {"A": f"role {r}"}) for r in range(2)]
    )
    assert [(p.env["A"], p.env["B"]) for p in plan(job, declared)] == [("role 0", "job"), ("role 1", "job")]


def test_services_come_first() -> None:
    roles = [("worker", 0), ("worker", 1), ("server", 0), ("scheduler", 0), ("server", 1)]
    declared = replace(
        PLAIN, plan=lambda job: [Process(*each, job.command, numbered=each[0] != "scheduler") for each in roles]
    )
    processes = plan(JOB, declared)
    assert [process.name for process in processes] == ["server 0", "scheduler", "server 1", "worker 0", "worker 1"]
    assert "RANK" not in processes[0].env  # a script must not take a server for worker 0
    assert processes[0].env["UNIDIST_ROLE"] == "server"


def test_a_plan_without_its_workers_is_refused() -> None:
    declared = replace(PLAIN, plan=lambda job: [Process("worker", 1, job.command)])
    with pytest.raises(LaunchError, match="workers 0 to 1"):
        plan(JOB, declared)


def test_servers_need_a_backend_that_has_them() -> None:
    with pytest.raises(LaunchError, match="no servers"):
        plan(replace(JOB, servers=1), PLAIN)


def test_the_token_is_never_shown() -> None:
    processes = plan(JOB, PLAIN)
    assert processes[0].env["UNIDIST_TOKEN"] == "secret"
    assert "secret" not in json.dumps(describe(processes))
    assert "secret" not in repr(JOB)


def test_what_other_launchers_said_is_not_inherited() -> None:
    foreign = (
        "TORCHELASTIC_RUN_ID PET_NNODES RANK LOCAL_RANK WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT HOROVOD_RANK "
        "HOROVOD_LOCAL_SIZE HOROVOD_GLOO_RENDEZVOUS_ADDR DMLC_ROLE DMLC_PS_ROOT_PORT OMPI_COMM_WORLD_RANK PMI_RANK "
        "PMIX_RANK SLURM_PROCID UNIDIST_RANK UNIDIST_TOKEN UNIDIST_BACKEND"
    )
    kept = "HOME NCCL_DEBUG HOROVOD_FUSION_THRESHOLD DMLC_INTERFACE SLURM_JOB_ID UNIDIST_HOME UNIDIST_DEBUG RANKING"
    env = dict.fromkeys(f"{foreign} {kept}".split(), "x")
    assert sorted(inherited(env)) == sorted(kept.split())


def test_ports_are_distinct_and_held() -> None:
    with Ports() as ours, Ports() as theirs:
        first, second = ours.take(20), theirs.take(20)
        assert len({*first, *second}) == 40
        assert list(first) == sorted(first)
        with pytest.raises(LaunchError, match=f"port {first[0]}"):
            theirs.fixed(first[0])
    with Ports() as later:
        assert later.fixed(first[0]) == first[0]

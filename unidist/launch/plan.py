"""A job as pure data: which processes run where, with which environment and command. Nothing starts here."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from unidist import registry
from unidist.backend import Plugin
from unidist.errors import LaunchError


@dataclass(frozen=True)
class Job:
    """What the user asked for, with every choice made: the input of a plan."""

    backend: str
    python: str  # the interpreter that has the framework
    command: tuple[str, ...]  # that interpreter, the script, its arguments
    nproc: int
    servers: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    host: str = "127.0.0.1"
    # Free ports, ascending. The first is MASTER_PORT; the plan may use the others, one for each process and one more.
    ports: tuple[int, ...] = ()
    control: str = ""  # address of the control plane
    token: str = field(default="", repr=False)
    restart: int = 0  # how many times the job was started again
    env: Mapping[str, str] = field(default_factory=dict)  # for every process

    @staticmethod
    def ports_needed(nproc: int, servers: int) -> int:
        return nproc + servers + 2


@dataclass(frozen=True)
class Process:
    """One process of a plan. A backend gives role, rank (within the role), what its role adds to the environment
    and the command; `plan` completes the environment with what every process of a job gets."""

    role: str
    rank: int
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    host: str = "127.0.0.1"
    numbered: bool = True  # False for a role of which there is only ever one, such as a scheduler
    cores: int = 0  # what it was given, for the totals of --dry-run; 0: not said
    gpus: int = 0
    cpu_devices: int = 0  # several devices of an engine that are only names for the same cores

    @property
    def name(self) -> str:
        return f"{self.role} {self.rank}" if self.numbered else self.role

    @property
    def is_worker(self) -> bool:
        """The job lasts as long as its workers; every other role serves them and ends with them."""
        return self.role == "worker"


def plan(job: Job, plugin: Plugin) -> list[Process]:
    """Every process of the job, services first (workers look for them), with its whole environment."""
    if plugin.plan is not None:
        processes = list(plugin.plan(job))
    elif job.servers:
        raise LaunchError(f"backend {plugin.name!r} has no servers: leave --servers out")
    else:
        processes = [Process("worker", rank, job.command, host=job.host) for rank in range(job.nproc)]
    workers = [process for process in processes if process.is_worker]
    if [process.rank for process in workers] != list(range(job.nproc)):
        raise LaunchError(
            f"the plan of backend {plugin.name!r} must have workers 0 to {job.nproc - 1} in order, "
            f"it has {[process.rank for process in workers]}"
        )
    ordered = [process for process in processes if not process.is_worker] + workers
    return [replace(process, env=_environment(job, process)) for process in ordered]


def _environment(job: Job, process: Process) -> dict[str, str]:
    # One machine for now: the local rank is the rank.
    common = {
        "UNIDIST_BACKEND": job.backend,
        "UNIDIST_OPTIONS": json.dumps(dict(job.options)),
        "UNIDIST_ROLE": process.role,
        "UNIDIST_RANK": str(process.rank),
        "UNIDIST_WORLD_SIZE": str(job.nproc),
        "UNIDIST_LOCAL_RANK": str(process.rank),
        "UNIDIST_LOCAL_WORLD_SIZE": str(job.nproc),
        "UNIDIST_NODE_RANK": "0",
        "UNIDIST_NUM_NODES": "1",
        "UNIDIST_MASTER_ADDR": job.host,
        "UNIDIST_MASTER_PORT": str(job.ports[0]) if job.ports else "",
        "UNIDIST_CONTROL": job.control,
        "UNIDIST_TOKEN": job.token,
        "UNIDIST_RESTART": str(job.restart),
        "PYTHONUNBUFFERED": "1",  # a line is shown when it is printed, and not lost when the process is killed
        "PYTHONFAULTHANDLER": "1",  # a crash in native code, or the end of a hang, shows where in the script it was
    }
    native = {  # for scripts that read these themselves
        "MASTER_ADDR": common["UNIDIST_MASTER_ADDR"],
        "MASTER_PORT": common["UNIDIST_MASTER_PORT"],
        "WORLD_SIZE": str(job.nproc),
        "RANK": str(process.rank),
        "LOCAL_RANK": str(process.rank),
        "LOCAL_WORLD_SIZE": str(job.nproc),
    }
    return {**common, **(native if process.is_worker else {}), **job.env, **process.env}


# Who a process is, as other launchers say it. Whoever runs `unidist run` inside one of them (a shell in an allocation,
# a notebook started by torchrun) would pass it on to every child. What tunes an engine (NCCL_*, …) stays.
_FOREIGN = (
    "UNIDIST_.*|TORCHELASTIC_.*|PET_.*|OMPI_COMM_WORLD_.*|PMIX?_.*|"
    "(LOCAL_|GROUP_|ROLE_|NODE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|ROLE_NAME|MASTER_(ADDR|PORT)|"
    "SLURM_(PROCID|LOCALID|NODEID)"
)
_OURS_TO_KEEP = frozenset({"UNIDIST_HOME", "UNIDIST_DEBUG", "UNIDIST_SECRET", "UNIDIST_SECRET_FILE"})


def inherited(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment that children inherit: ours, without what another launcher said about us."""
    engines = [plugin.launcher.private for plugin in registry.loadable() if plugin.launcher]
    foreign = re.compile("|".join([_FOREIGN, *engines]))
    return {name: value for name, value in env.items() if name in _OURS_TO_KEEP or not foreign.fullmatch(name)}


TOTALS = {"cores": "CPU", "gpus": "GPU", "cpu_devices": "devices on the CPU"}


def totals(processes: Sequence[Process]) -> str:
    """What the job takes, role by role: "2 x 1 + 12 x 2 = 26 CPU, 2 x 2 = 4 GPU"; empty when nobody said."""
    sums = []
    for attribute, unit in TOTALS.items():
        counts: dict[tuple[str, int], int] = {}
        for process in processes:
            amount = getattr(process, attribute)
            if amount:
                counts[process.role, amount] = counts.get((process.role, amount), 0) + 1
        if counts:
            parts = " + ".join(f"{amount} x {count}" for (_, amount), count in counts.items())
            sums.append(f"{parts} = {sum(amount * count for (_, amount), count in counts.items())} {unit}")
    return ", ".join(sums)


def describe(processes: Sequence[Process]) -> list[dict[str, Any]]:
    """The plan as JSON data. The token is a secret and is left out."""
    return [
        {
            "role": process.role,
            "rank": process.rank,
            "host": process.host,
            **{name: value for name in TOTALS if (value := getattr(process, name))},
            "command": list(process.command),
            "env": {name: value for name, value in process.env.items() if name != "UNIDIST_TOKEN"},
        }
        for process in processes
    ]

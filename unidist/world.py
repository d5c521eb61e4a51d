"""Who am I, and who else is there: `World`, and how it is found in each cluster environment.

The first of these that applies wins, and `World.source` and `World.reason` say which and why:

 1. arguments    `init=`, `rank=`, `world_size=`
 2. unidist      UNIDIST_RANK, UNIDIST_WORLD_SIZE: `unidist run`
 3. torchrun     TORCHELASTIC_RUN_ID: torchrun, `python -m torch.distributed.launch`
 4. horovod      HOROVOD_RANK: horovodrun with gloo
 5. dmlc         DMLC_ROLE: MXNet's launch.py, Kubeflow MXJob (with MX_CONFIG)
 6. openmpi      OMPI_COMM_WORLD_RANK: mpirun, Kubeflow MPIJob
 7. slurm        SLURM_STEP_ID with the step's sizes: a task of srun, not the batch script
 8. kubeflow     PET_NNODES or PET_NODE_RANK without LOCAL_RANK: a PyTorchJob or TrainJob pod
 9. environment  RANK, WORLD_SIZE: anything else that follows torch's env://
10. none         one process

An inner launcher comes before the outer one it may run inside: mpirun starts its daemons through srun.
An environment that is recognised but partial, or contradicts itself, is an error; it is never skipped.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict
from urllib.parse import urlsplit

from unidist.errors import WorldError


@dataclass(frozen=True)
class World:
    """One process's place among all. What the launcher does not tell is -1 (a rank) or 0 (a size)."""

    rank: int
    world_size: int
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    role: str = "worker"
    master_addr: str | None = None
    master_port: int | None = None
    source: str = "none"
    reason: str = "no launcher's variables are set"

    @property
    def is_main(self) -> bool:
        return self.rank == 0 and self.role == "worker"


def detect(
    env: Mapping[str, str] | None = None,
    *,
    init: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    timeout: float = 300.0,
) -> World:
    """Find this process's World; the arguments win over `env` (default: os.environ).

    `init` is "tcp://host:port" or "file:///path", both with rank and world_size, or "env://", the default.
    Only file:// waits for the other ranks, at most `timeout` seconds.
    """
    variables = _Variables(os.environ if env is None else env)
    if init is not None and init != "env://":
        return _initialised(variables, init, rank, world_size, timeout)
    if rank is None and world_size is None:
        return _environment(variables)
    return _overridden(variables, rank, world_size)


# -- arguments -----------------------------------------------------------------------------------------------


def _initialised(env: _Variables, init: str, rank: int | None, size: int | None, timeout: float) -> World:
    reason = f"init={init!r} was given"
    if rank is None or size is None:
        missing = " and ".join(n for n, v in (("rank", rank), ("world_size", size)) if v is None)
        raise WorldError(f"{reason}, but not {missing}: give each process its rank= and the common world_size=")
    _check_rank("rank", rank, "world_size", size)
    scheme, _, rest = init.partition("://")
    if scheme == "tcp":
        addr, port = _tcp(init)
        return World(rank, size, **env.place(rank, size, addr), **_master(addr, port), source="tcp", reason=reason)
    if scheme == "file":
        if not rest.startswith("/"):
            raise WorldError(f"{reason}: a file needs an absolute path, as in file:///shared/run1 (three slashes)")
        from unidist.rendezvous import meet  # it needs an HTTP server, which others should not pay for

        meeting = meet(rest, rank, size, timeout)
        return World(
            rank,
            size,
            local_rank=env.number("LOCAL_RANK", default=meeting.local_rank),
            local_world_size=meeting.local_world_size,
            node_rank=meeting.node_rank,
            num_nodes=meeting.num_nodes,
            master_addr=meeting.master_addr,
            master_port=meeting.master_port,
            source="file",
            reason=reason,
        )
    raise WorldError(f"{reason}; expected tcp://host:port, file:///path or env://")


def _tcp(init: str) -> tuple[str, int]:
    url = urlsplit(init)
    try:
        port = url.port
    except ValueError:
        port = None
    if not url.hostname or not port:
        raise WorldError(f"init={init!r} was given; expected tcp://host:port with a port from 1 to 65535")
    return url.hostname, port


def _overridden(env: _Variables, rank: int | None, size: int | None) -> World:
    """rank= and world_size= without a place to meet: that comes from the environment, as may one of the two."""
    given = ", ".join(f"{n}={v}" for n, v in (("rank", rank), ("world_size", size)) if v is not None)
    found = World(0, 1)
    if rank is None or size is None or (size > 1 and "MASTER_ADDR" not in env):
        found = _environment(env)
        if found.source == "none" and (rank is None or size is None):
            missing = "world_size" if size is None else "rank"
            raise WorldError(f"{given} was given, but not {missing}, nor init=, and no launcher's variables are set")
    rank = found.rank if rank is None else rank
    size = found.world_size if size is None else size
    _check_rank("rank", rank, "world_size", size)
    addr, port = found.master_addr, found.master_port
    if "MASTER_ADDR" in env:
        addr, port = env.text("MASTER_ADDR"), env.port("MASTER_PORT")
    if size > 1 and addr is None:
        raise WorldError(
            f"{given} was given, but nowhere to meet: add init='tcp://host:port', the same on every rank, "
            "or set MASTER_ADDR and MASTER_PORT"
        )
    place = env.place(rank, size, addr)
    return World(rank, size, **place, **_master(addr, port), source="arguments", reason=f"{given} was given")


# -- reading variables ---------------------------------------------------------------------------------------


class _Place(TypedDict):
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int


class _Master(TypedDict):
    master_addr: str | None
    master_port: int | None


def _master(addr: str | None, port: int | None) -> _Master:
    return {"master_addr": addr, "master_port": port}


class _Variables:
    """Environment variables, read with errors that name the variable and its value. Empty is the same as unset."""

    def __init__(self, values: Mapping[str, str], launcher: str = "") -> None:
        self._values = values
        self._launcher = launcher

    def of(self, launcher: str) -> _Variables:
        """The same, with `launcher` named in errors as the one that should have set them."""
        return _Variables(self._values, launcher)

    def __contains__(self, name: str) -> bool:
        return self.text(name) is not None

    def text(self, name: str) -> str | None:
        return self._values.get(name, "").strip() or None

    def number(self, name: str, default: int | None = None) -> int:
        text = self.text(name)
        if text is None and default is not None:
            return default
        if text is None:
            raise WorldError(f"{name} is not set: {self._launcher}")
        if not re.fullmatch(r"[0-9]+", text):
            raise WorldError(f"{name} is {text!r}, which is not a whole number from 0 up: {self._launcher}")
        return int(text)

    def port(self, name: str) -> int:
        port = self.number(name)
        if not 0 < port < 65536:
            raise WorldError(f"{name} is {port}, which is not a port: set it to a free one from 1 to 65535")
        return port

    def numbers(self, name: str, other: str) -> tuple[int, int]:
        return self.number(name), self.number(other)

    def rank(self, name: str, size_name: str) -> tuple[int, int]:
        rank, size = self.numbers(name, size_name)
        _check_rank(name, rank, size_name, size, self._launcher)
        return rank, size

    def meeting_point(self, addr: str = "MASTER_ADDR", port: str = "MASTER_PORT") -> _Master:
        """The address and port, which belong together; neither is fine."""
        if addr not in self and port not in self:
            return _master(None, None)
        if addr not in self:
            raise WorldError(f"{addr} is not set, but {port} is {self.text(port)}: {self._launcher}")
        return _master(self.text(addr), self.port(port))

    def place(self, rank: int, size: int, addr: str | None) -> _Place:
        """Where on the nodes this rank is, when only LOCAL_RANK may tell, or the master's address."""
        if "LOCAL_RANK" not in self and addr is not None and not _is_loopback(addr):
            return {"local_rank": 0, "local_world_size": 1, "node_rank": rank, "num_nodes": size}
        together = addr is None or _is_loopback(addr)
        local_rank = self.number("LOCAL_RANK", default=rank)
        local_size = self.number("LOCAL_WORLD_SIZE", default=size if together else 0)
        if local_size:
            _check_rank("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_size, self._launcher)
        if together:
            return {"local_rank": local_rank, "local_world_size": local_size, "node_rank": 0, "num_nodes": 1}
        nodes = size // local_size if local_size and size % local_size == 0 else 0
        node = (rank - local_rank) // local_size if nodes else -1
        return {"local_rank": local_rank, "local_world_size": local_size, "node_rank": node, "num_nodes": nodes}


def _check_rank(name: str, rank: int, size_name: str, size: int, advice: str = "") -> None:
    if isinstance(rank, bool) or not isinstance(rank, int) or not isinstance(size, int):
        raise WorldError(f"{name}={rank!r} and {size_name}={size!r} must both be whole numbers")
    if size < 1 or not 0 <= rank < size:
        advice = advice or "ranks go from 0 to one less than the size"
        raise WorldError(f"{name} is {rank} and {size_name} is {size}, which cannot be: {advice}")


def _is_loopback(addr: str) -> bool:
    return addr in ("localhost", "::1") or addr.startswith("127.")


def _job_port(number: int) -> int:
    """A port that all processes of a job derive alike. Below the ephemeral range, where it could be taken."""
    return 20000 + number % 12000


# -- one class for each environment --------------------------------------------------------------------------


class _Unidist:
    name = "unidist"

    def detect(self, env: _Variables) -> World | None:
        if "UNIDIST_RANK" not in env and "UNIDIST_WORLD_SIZE" not in env:
            return None
        env = env.of("`unidist run` sets it for each process; unset the other UNIDIST_* variables to start without")
        role = env.text("UNIDIST_ROLE") or "worker"
        # Servers are numbered among themselves, while the sizes are those of the workers.
        pair = env.rank if role == "worker" else env.numbers
        rank, size = pair("UNIDIST_RANK", "UNIDIST_WORLD_SIZE")
        local_rank, local_size = pair("UNIDIST_LOCAL_RANK", "UNIDIST_LOCAL_WORLD_SIZE")
        node, nodes = env.rank("UNIDIST_NODE_RANK", "UNIDIST_NUM_NODES")
        master = env.meeting_point("UNIDIST_MASTER_ADDR", "UNIDIST_MASTER_PORT")
        reason = "UNIDIST_RANK is set"
        return World(rank, size, local_rank, local_size, node, nodes, role, **master, source=self.name, reason=reason)


class _Torchrun:
    name = "torchrun"

    def detect(self, env: _Variables) -> World | None:
        if "TORCHELASTIC_RUN_ID" not in env:
            return None
        env = env.of("torchrun sets it; start with torchrun, or unset TORCHELASTIC_RUN_ID if this is not its process")
        rank, size = env.rank("RANK", "WORLD_SIZE")
        local_rank, local_size = env.rank("LOCAL_RANK", "LOCAL_WORLD_SIZE")
        node = env.number("GROUP_RANK", default=0)
        nodes = env.number("GROUP_WORLD_SIZE", default=max(1, size // local_size))
        master = _master(env.text("MASTER_ADDR") or "127.0.0.1", env.port("MASTER_PORT"))
        reason = "TORCHELASTIC_RUN_ID is set"
        return World(rank, size, local_rank, local_size, node, nodes, **master, source=self.name, reason=reason)


class _Horovod:
    name = "horovod"

    def detect(self, env: _Variables) -> World | None:
        if "HOROVOD_RANK" not in env:
            return None
        env = env.of("horovodrun sets it; start with horovodrun, or unset HOROVOD_RANK")
        rank, size = env.rank("HOROVOD_RANK", "HOROVOD_SIZE")
        local_rank, local_size = env.rank("HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE")
        node, nodes = env.rank("HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE")
        master = env.meeting_point()  # horovodrun gives none: Horovod has a rendezvous of its own
        reason = "HOROVOD_RANK is set"
        return World(rank, size, local_rank, local_size, node, nodes, **master, source=self.name, reason=reason)


class _Dmlc:
    name = "dmlc"
    roles = ("worker", "server", "scheduler")

    def detect(self, env: _Variables) -> World | None:
        role = env.text("DMLC_ROLE")
        if role is None:
            return None
        if role not in self.roles:
            raise WorldError(f"DMLC_ROLE is {role!r}; expected one of {', '.join(self.roles)}")
        env = env.of("MXNet's launcher sets it with DMLC_ROLE; unset DMLC_ROLE to start without")
        size, _ = env.numbers("DMLC_NUM_WORKER", "DMLC_NUM_SERVER")  # ps-lite wants both, and says so badly
        addr, port = env.text("DMLC_PS_ROOT_URI"), env.port("DMLC_PS_ROOT_PORT")
        if addr is None:
            raise WorldError("DMLC_PS_ROOT_URI is not set, but DMLC_ROLE is: set it to the scheduler's address")
        together = env.text("DMLC_JOB_CLUSTER") == "local"  # launch.py --launcher local
        index = self._mx_config(env, role, addr, port) if "MX_CONFIG" in env else None
        rank = -1  # ps-lite numbers the workers only when they connect
        if role == "worker":
            for name in ("DMLC_WORKER_ID", *(["DMLC_TASK_ID"] if together else [])):
                if rank < 0 and name in env:
                    rank, size = env.rank(name, "DMLC_NUM_WORKER")
            if index is not None and rank not in (-1, index):
                raise WorldError(f"DMLC_WORKER_ID is {rank}, but task.index in MX_CONFIG is {index}: unset one of them")
            rank = rank if index is None else index
        place: _Place = {"local_rank": -1, "local_world_size": 0, "node_rank": -1, "num_nodes": 0}
        if rank >= 0:
            place = env.place(rank, size, None if together else addr)
        elif together or _is_loopback(addr):
            place = {"local_rank": -1, "local_world_size": size, "node_rank": 0, "num_nodes": 1}
        reason = f"DMLC_ROLE is {role}" + ("" if index is None else " and MX_CONFIG is set")
        return World(rank, size, **place, role=role, **_master(addr, port), source=self.name, reason=reason)

    def _mx_config(self, env: _Variables, role: str, addr: str, port: int) -> int:
        """The index of this pod among those of its role in a Kubeflow MXJob, whose other variables must agree."""
        advice = "the Kubeflow operator sets both; unset MX_CONFIG if this is no pod of an MXJob"
        try:
            config = json.loads(env.text("MX_CONFIG") or "")
            replicas = {name: [(each["url"], each["port"]) for each in of] for name, of in config["cluster"].items()}
            kind, index = config["task"]["type"], config["task"]["index"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WorldError(f"MX_CONFIG cannot be read ({type(error).__name__}: {error}): {advice}") from error
        for name, said, found in (
            ("DMLC_ROLE", role, str(kind).lower()),
            ("DMLC_NUM_WORKER", env.number("DMLC_NUM_WORKER"), len(replicas.get("worker", ()))),
            ("DMLC_NUM_SERVER", env.number("DMLC_NUM_SERVER"), len(replicas.get("server", ()))),
            ("DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT", [(addr, port)], replicas.get("scheduler", [])),
        ):
            if said != found:
                raise WorldError(f"{name}: {said!r} is set, but MX_CONFIG says {found!r}: {advice}")
        _check_rank("task.index in MX_CONFIG", index, f"the number of {role}s in it", len(replicas[role]), advice)
        return int(index)


class _OpenMpi:
    name = "openmpi"

    def detect(self, env: _Variables) -> World | None:
        if "OMPI_COMM_WORLD_RANK" not in env:
            return None
        env = env.of("mpirun sets it; start with mpirun, or unset OMPI_COMM_WORLD_RANK")
        rank, size = env.rank("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
        local_rank, local_size = env.rank("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
        addr = env.text("MASTER_ADDR")
        if addr is None and local_size < size:
            raise WorldError(
                f"MASTER_ADDR is not set, and mpirun has put only {local_size} of {size} ranks "
                "(OMPI_COMM_WORLD_SIZE) on this host: name rank 0's host with `mpirun -x MASTER_ADDR=<host> ...`"
            )
        # Open MPI does not number the hosts; this is right for its default, which fills one after the other.
        node, nodes = rank // local_size, -(-size // local_size)
        master = _master(addr or "127.0.0.1", self._port(env))
        reason = "OMPI_COMM_WORLD_RANK is set"
        return World(rank, size, local_rank, local_size, node, nodes, **master, source=self.name, reason=reason)

    def _port(self, env: _Variables) -> int:
        if "MASTER_PORT" in env:
            return env.port("MASTER_PORT")
        job = env.text("OMPI_MCA_ess_base_jobid") or env.text("PMIX_NAMESPACE")
        if job is None:
            raise WorldError("MASTER_PORT is not set: choose a free one with `mpirun -x MASTER_PORT=<port> ...`")
        return _job_port(zlib.crc32(job.encode()))


class _Slurm:
    name = "slurm"

    def detect(self, env: _Variables) -> World | None:
        if "SLURM_STEP_ID" not in env or "SLURM_STEP_TASKS_PER_NODE" not in env:
            return None
        env = env.of("srun sets it for its tasks; start with srun, or unset SLURM_STEP_ID")
        sizes = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
        rank, size = env.rank("SLURM_PROCID", sizes)
        tasks = tasks_per_node(env.text("SLURM_STEP_TASKS_PER_NODE") or "")
        hosts = expand_hostlist(env.text("SLURM_STEP_NODELIST") or "")
        if len(tasks) != len(hosts) or sum(tasks) != size:
            raise WorldError(
                f"SLURM_STEP_TASKS_PER_NODE is {env.text('SLURM_STEP_TASKS_PER_NODE')!r}, which does not fit "
                f"SLURM_STEP_NODELIST={env.text('SLURM_STEP_NODELIST')!r} and {sizes}={size}: start with srun again"
            )
        node = env.number("SLURM_NODEID")
        _check_rank("SLURM_NODEID", node, "the number of hosts in SLURM_STEP_NODELIST", len(hosts))
        local_rank = env.number("SLURM_LOCALID")
        _check_rank("SLURM_LOCALID", local_rank, "this node's share of SLURM_STEP_TASKS_PER_NODE", tasks[node])
        addr = env.text("MASTER_ADDR") or (hosts[0] if len(hosts) > 1 else "127.0.0.1")
        # 101 keeps the first hundred steps of neighbouring jobs apart.
        port = _job_port(101 * env.number("SLURM_JOB_ID") + env.number("SLURM_STEP_ID"))
        master = _master(addr, env.port("MASTER_PORT") if "MASTER_PORT" in env else port)
        reason = "SLURM_STEP_ID is set"
        return World(rank, size, local_rank, tasks[node], node, len(hosts), **master, source=self.name, reason=reason)


class _Kubeflow:
    """A pod of a PyTorchJob or TrainJob whose command is the script itself, not torchrun."""

    name = "kubeflow"

    def detect(self, env: _Variables) -> World | None:
        marker = next((name for name in ("PET_NODE_RANK", "PET_NNODES") if name in env), None)
        if marker is None or "LOCAL_RANK" in env:
            return None
        inside = "start it with torchrun or `unidist run` inside the pod"
        env = env.of(f"the Kubeflow operator sets it; {inside}, or unset {marker} if this is no such pod")
        nproc = env.text("PET_NPROC_PER_NODE") or "1"
        # Words (auto, cpu, gpu) leave the number to torchrun, and the operator counts them as one.
        if nproc.isdecimal() and int(nproc) > 1:
            raise WorldError(
                f"PET_NPROC_PER_NODE is {nproc}, but the pod's command started one process: {inside}, "
                "or set nprocPerNode (numProcPerNode) to 1"
            )
        if ":" in (env.text("PET_NNODES") or ""):
            raise WorldError(f"PET_NNODES is {env.text('PET_NNODES')}, an elastic job: {inside}")
        # A pod is a rank here. RANK is the pod's index, which differs from PET_NODE_RANK in no known operator.
        sizes = "PET_NNODES" if "PET_NNODES" in env else "WORLD_SIZE"
        rank, size = env.rank("PET_NODE_RANK" if "PET_NODE_RANK" in env else "RANK", sizes)
        if env.number("WORLD_SIZE", default=size) != size:
            raise WorldError(f"WORLD_SIZE is {env.text('WORLD_SIZE')}, but {sizes} is {size}: {inside}")
        master = env.meeting_point()
        if master["master_addr"] is None:
            master = env.meeting_point("PET_MASTER_ADDR", "PET_MASTER_PORT")
        if size > 1 and master["master_addr"] is None:
            raise WorldError(f"neither MASTER_ADDR nor PET_MASTER_ADDR is set, but {sizes} is {size}: {inside}")
        reason = f"{marker} is set"
        return World(rank, size, 0, 1, rank, size, **master, source=self.name, reason=reason)


class _Plain:
    name = "environment"

    def detect(self, env: _Variables) -> World | None:
        if "RANK" not in env and "WORLD_SIZE" not in env:
            return None
        if env.text("RANK") == "-1" and env.text("WORLD_SIZE") == "1":
            return None  # OneFlow writes this into its own environment when it is imported without a launcher
        found = "RANK" if "RANK" in env else "WORLD_SIZE"
        env = env.of(
            "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, "
            f"or unset {found} (now {env.text(found)!r}) to run as one process"
        )
        rank, size = env.rank("RANK", "WORLD_SIZE")
        master = env.meeting_point()
        if size > 1 and master["master_addr"] is None:
            raise WorldError(f"MASTER_ADDR is not set, but WORLD_SIZE is {size}: set it to rank 0's host")
        place = env.place(rank, size, master["master_addr"])
        reason = "RANK and WORLD_SIZE are set"
        return World(rank, size, **place, **master, source=self.name, reason=reason)


ENVIRONMENTS = (_Unidist(), _Torchrun(), _Horovod(), _Dmlc(), _OpenMpi(), _Slurm(), _Kubeflow(), _Plain())


def _environment(env: _Variables) -> World:
    for environment in ENVIRONMENTS:
        world = environment.detect(env)
        if world is not None:
            return world
    return World(0, 1)


# -- Slurm's notations ---------------------------------------------------------------------------------------


def tasks_per_node(text: str) -> list[int]:
    """ "4,1(x2)" is [4, 1, 1]."""
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise WorldError(f"cannot read {text!r} as Slurm's tasks per node, such as 4,1(x2)")
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def expand_hostlist(text: str) -> list[str]:
    """ "h[0-2,5],g1" is h0, h1, h2, h5, g1; zeros in front are kept, and several brackets multiply."""
    hosts: list[str] = []
    for item in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text):
        names = [""]
        for literal, ranges in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", item):
            endings = [literal] if literal else _expand_ranges(ranges, text)
            names = [name + ending for name in names for ending in endings]
        hosts += names
    if not hosts or text.count("[") != text.count("]"):
        raise WorldError(f"cannot read {text!r} as Slurm's list of hosts, such as h[0-2,5],g1")
    return hosts


def _expand_ranges(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match is None:
            raise WorldError(f"cannot read {text!r} as Slurm's list of hosts, such as h[0-2,5],g1")
        first, last = match[1], match[2] or match[1]
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return numbers

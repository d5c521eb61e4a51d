"""The environments in which processes find each other: one class for each general launcher.

Those of the plug-ins, which come between `FIRST` and `LAST`, are theirs."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator

from unidist import registry
from unidist.errors import WorldError
from unidist.world.slurm import expand_hostlist, tasks_per_node
from unidist.world.variables import Variables, check_rank, job_port, master_at
from unidist.world.world import World


class Unidist:
    name = "unidist"

    def detect(self, env: Variables) -> World | None:
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
        place = (rank, size, local_rank, local_size, node, nodes, role)
        return World(*place, **master, source=self.name, reason=reason, placed=True)


class Torchrun:
    name = "torchrun"

    def detect(self, env: Variables) -> World | None:
        if "TORCHELASTIC_RUN_ID" not in env:
            return None
        env = env.of("torchrun sets it; start with torchrun, or unset TORCHELASTIC_RUN_ID if this is not its process")
        rank, size = env.rank("RANK", "WORLD_SIZE")
        local_rank, local_size = env.rank("LOCAL_RANK", "LOCAL_WORLD_SIZE")
        node = env.number("GROUP_RANK", default=0)
        nodes = env.number("GROUP_WORLD_SIZE", default=max(1, size // local_size))
        master = master_at(env.text("MASTER_ADDR") or "127.0.0.1", env.port("MASTER_PORT"))
        # Its agent keeps a store there for its workers, unless told otherwise.
        taken = env.text("TORCHELASTIC_USE_AGENT_STORE") == "True"
        place = (rank, size, local_rank, local_size, node, nodes)
        reason = "TORCHELASTIC_RUN_ID is set"
        return World(*place, **master, source=self.name, reason=reason, placed=True, port_taken=taken)


class OpenMpi:
    name = "openmpi"

    def detect(self, env: Variables) -> World | None:
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
        master = master_at(addr or "127.0.0.1", self._port(env))
        reason = "OMPI_COMM_WORLD_RANK is set"
        return World(rank, size, local_rank, local_size, node, nodes, **master, source=self.name, reason=reason)

    def _port(self, env: Variables) -> int:
        if "MASTER_PORT" in env:
            return env.port("MASTER_PORT")
        job = env.text("OMPI_MCA_ess_base_jobid") or env.text("PMIX_NAMESPACE")
        if job is None:
            raise WorldError("MASTER_PORT is not set: choose a free one with `mpirun -x MASTER_PORT=<port> ...`")
        return job_port(zlib.crc32(job.encode()))


class Slurm:
    name = "slurm"

    def detect(self, env: Variables) -> World | None:
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
        check_rank("SLURM_NODEID", node, "the number of hosts in SLURM_STEP_NODELIST", len(hosts))
        local_rank = env.number("SLURM_LOCALID")
        check_rank("SLURM_LOCALID", local_rank, "this node's share of SLURM_STEP_TASKS_PER_NODE", tasks[node])
        addr = env.text("MASTER_ADDR") or (hosts[0] if len(hosts) > 1 else "127.0.0.1")
        # 101 keeps the first hundred steps of neighbouring jobs apart.
        port = job_port(101 * env.number("SLURM_JOB_ID") + env.number("SLURM_STEP_ID"))
        master = master_at(addr, env.port("MASTER_PORT") if "MASTER_PORT" in env else port)
        place = (rank, size, local_rank, tasks[node], node, len(hosts))
        return World(*place, **master, source=self.name, reason="SLURM_STEP_ID is set", placed=True)


class Kubeflow:
    """A pod of a PyTorchJob or TrainJob whose command is the script itself, not torchrun."""

    name = "kubeflow"

    def detect(self, env: Variables) -> World | None:
        marker = next((name for name in ("PET_NODE_RANK", "PET_NNODES") if name in env), None)
        if marker is None or "LOCAL_RANK" in env:
            return None
        # `unidist run` is for one machine: in each of several pods it would start a job of its own.
        launchers = "torchrun or `unidist run`" if env.text("PET_NNODES") == "1" else "torchrun"
        inside = f"start it with {launchers} inside the pod"
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


class Plain:
    name = "environment"

    def detect(self, env: Variables) -> World | None:
        if "RANK" not in env and "WORLD_SIZE" not in env:
            return None
        if env.text("RANK") == "-1" and env.text("WORLD_SIZE") == "1":
            return None  # an engine that was imported without a launcher may have left this behind
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


FIRST = (Unidist(), Torchrun())  # of these no process knows more than they say, and no plug-in has to be asked
LAST = (OpenMpi(), Slurm(), Kubeflow(), Plain())


def from_environment(env: Variables) -> World:
    return next((world for detect in _detectors() if (world := detect(env)) is not None), World(0, 1))


def _detectors() -> Iterator[Callable[[Variables], World | None]]:
    yield from (environment.detect for environment in FIRST)
    yield from (plugin.launcher.detect for plugin in registry.loadable() if plugin.launcher)
    yield from (environment.detect for environment in LAST)

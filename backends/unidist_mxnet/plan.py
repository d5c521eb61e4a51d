"""The processes of a job: a scheduler, servers, workers. Or one worker alone, when nothing has to be distributed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from unidist.errors import UsageError
from unidist.launch.plan import Process

if TYPE_CHECKING:
    from unidist.launch.plan import Job


def plan(job: Job) -> Sequence[Process]:
    from unidist_mxnet import MxnetOptions

    options = MxnetOptions(**job.options)
    servers = _servers(job, options)
    gpus = options.device_count if _on_gpus(options) else 0
    worker = {"cores": options.worker_cores, "gpus": gpus, "host": job.host}
    if not servers:
        return [Process("worker", 0, job.command, _threads(options.worker_cores), **worker)]
    cluster = {
        "DMLC_PS_ROOT_URI": job.host,
        "DMLC_PS_ROOT_PORT": str(job.ports[0]) if job.ports else "",
        "DMLC_NODE_HOST": job.host,
        "DMLC_NUM_SERVER": str(servers),
        "DMLC_NUM_WORKER": str(job.nproc),
        "MXNET_KVSTORE_BIGARRAY_BOUND": str(options.bigarray_bound),
    }
    service = (job.python, "-m", "unidist_mxnet.roles")
    processes = [Process("scheduler", 0, service, {**cluster, "DMLC_ROLE": "scheduler"}, job.host, numbered=False)]
    for rank in range(servers):
        env = {**cluster, "DMLC_ROLE": "server", **_threads(options.server_cores)}
        processes.append(Process("server", rank, service, env, job.host, cores=options.server_cores))
    for rank in range(job.nproc):
        # ps-lite numbers workers by their ports; left to chance, worker 0's log would not be rank 0's.
        port = {"PORT": str(job.ports[1 + rank])} if job.ports else {}
        env = {**cluster, **port, "DMLC_ROLE": "worker", **_threads(options.worker_cores)}
        processes.append(Process("worker", rank, job.command, env, **worker))
    return processes


def _servers(job: Job, options: object) -> int:
    """How many servers; 0 for one worker that needs none."""
    kvstore, asked = options.kvstore, options.servers  # type: ignore[attr-defined]
    if job.servers and asked and job.servers != asked:
        raise UsageError(f"--servers {job.servers} and the option servers={asked} contradict each other: keep one")
    servers = job.servers or asked
    if kvstore in ("local", "device"):
        if servers or job.nproc > 1:
            what = f"{servers} servers" if servers else f"{job.nproc} workers"
            raise UsageError(f"kvstore {kvstore!r} is for one worker without servers, not {what}: use dist_sync")
        return 0
    if kvstore == "auto" and job.nproc == 1 and not options.server_updates:  # type: ignore[attr-defined]
        return servers
    return servers or 1


def _on_gpus(options: object) -> bool:
    devices = options.devices  # type: ignore[attr-defined]
    return isinstance(devices, (list, tuple)) and all(each.startswith(("gpu", "cuda")) for each in devices)


def _threads(cores: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(cores)} if cores else {}

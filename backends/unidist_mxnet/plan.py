"""The processes of a job: a scheduler, servers, workers. Or one worker alone, when nothing has to be distributed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from unidist.plugin import Process, UsageError, gpus

if TYPE_CHECKING:
    from unidist.plugin import Job
    from unidist_mxnet import MxnetOptions


def plan(job: Job) -> Sequence[Process]:
    from unidist_mxnet import MxnetOptions, memory

    options = MxnetOptions(**job.options)
    servers = _servers(job, options)
    on_gpus, on_cpu = _devices(options)

    def worker(rank: int, env: dict[str, str]) -> Process:
        env = {**env, **_threads(options.worker_cores)}
        return Process(
            "worker", rank, job.command, env, job.host, cores=options.worker_cores, gpus=on_gpus, cpu_devices=on_cpu
        )

    if not servers:
        return [worker(0, {})]
    if options.server_memory and options.server_memory_check == "refuse":
        has = memory.of_this_process()
        if problem := memory.granted_too_much(servers, options.server_memory, has, "this machine"):
            raise UsageError(problem)
    cluster = {
        "DMLC_PS_ROOT_URI": job.host,
        "DMLC_PS_ROOT_PORT": str(job.ports[0]) if job.ports else "",
        "DMLC_NODE_HOST": job.host,
        "DMLC_NUM_SERVER": str(servers),
        "DMLC_NUM_WORKER": str(job.nproc),
        "MXNET_KVSTORE_BIGARRAY_BOUND": str(options.bigarray_bound),
    }
    service = (job.python, "-m", "unidist_mxnet.services")
    processes = [Process("scheduler", 0, service, {**cluster, "DMLC_ROLE": "scheduler"}, job.host, numbered=False)]
    for rank in range(servers):
        env = {**cluster, "DMLC_ROLE": "server", **_threads(options.server_cores)}
        processes.append(Process("server", rank, service, env, job.host, cores=options.server_cores))
    for rank in range(job.nproc):
        # ps-lite numbers workers by their ports; left to chance, worker 0's log would not be rank 0's.
        port = {"PORT": str(job.ports[1 + rank])} if job.ports else {}
        processes.append(worker(rank, {**cluster, **port, "DMLC_ROLE": "worker"}))
    return processes


def _servers(job: Job, options: MxnetOptions) -> int:
    """How many servers; 0 for one worker that needs none."""
    kvstore, asked = options.kvstore, options.servers
    if job.servers and asked and job.servers != asked:
        raise UsageError(f"--servers {job.servers} and the option servers={asked} contradict each other: keep one")
    servers = job.servers or asked
    if kvstore in ("local", "device"):
        if servers or job.nproc > 1:
            what = f"{servers} servers" if servers else f"{job.nproc} workers"
            raise UsageError(f"kvstore {kvstore!r} is for one worker without servers, not {what}: use dist_sync")
        return 0
    if kvstore == "auto" and job.nproc == 1 and not options.server_updates:
        return servers
    return servers or 1


def _devices(options: MxnetOptions) -> tuple[int, int]:
    """How many GPUs one worker drives, and how many CPU devices, where these are several. A mere number of devices
    means GPUs where there are any, as it will when it starts."""
    named = options.devices if isinstance(options.devices, (list, tuple)) else []
    on_gpus = (
        sum(device.startswith(("gpu", "cuda")) for device in named) if named else options.device_count * bool(gpus())
    )
    on_cpu = options.device_count - on_gpus
    return on_gpus, on_cpu if options.device_count > 1 else 0


def _threads(cores: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(cores)} if cores else {}

"""The OneFlow backend's declaration. Nothing here imports oneflow: it reads its cluster when it is imported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from unidist.plugin import (
    ArrayNames,
    Capabilities,
    Job,
    Plugin,
    Process,
    UsageError,
    World,
    check_choice,
    check_flag,
    check_whole,
    is_whole,
)
from unidist_oneflow.recipe import RECIPE

VIEWS = ("mirrored", "consistent")
DEFAULT_CTRL_PORT = 9988


@dataclass(frozen=True)
class OneFlowOptions:
    """The cluster in OneFlow's own words, and how tensors are seen.

    machine         [{"addr": "192.168.1.12"}, {"addr": "192.168.1.11"}], or "192.168.1.12,192.168.1.11"; the first one
                    is the master. Every node runs the same script and finds itself in the list by its addresses
    ctrl_port       a port that is free on the master: there the ranks meet, and then OneFlow itself listens. Its data
                    goes over ports that it chooses, so nodes must reach each other on all of them
    gpu_device_num  processes on each node, one for each GPU; with device="cpu" on the CPU
    node_rank       this node's place in the list, where its own addresses do not tell
    view            "mirrored": local tensors, as in other frameworks; "consistent": the model is made of global tensors
    graph           consistent view: compile the step to an nn.Graph. What Python computes in the loss function, and the
                    masks of a functional dropout, then stay as they were at the first step with such a batch
    verbose         show what OneFlow prints when it starts
    """

    machine: Any = None
    ctrl_port: int | None = None
    gpu_device_num: int | None = None
    node_rank: int | None = None
    view: str = "mirrored"
    graph: bool = True
    verbose: bool = False

    def __post_init__(self) -> None:
        if self.machine is not None:
            object.__setattr__(self, "machine", _addresses(self.machine))
        check_choice("view", self.view, VIEWS)
        for name, low, high in (("ctrl_port", 1, 65535), ("gpu_device_num", 1, 1024)):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), low, high)
        nodes = len(self.machine or ("here",))
        if self.node_rank is not None and (not is_whole(self.node_rank, 0, nodes - 1)):
            raise UsageError(f"node_rank is {self.node_rank!r}, the list of machines has nodes 0 to {nodes - 1}")
        for name in ("graph", "verbose"):
            check_flag(name, getattr(self, name))

    @property
    def describes_cluster(self) -> bool:
        return self.machine is not None or self.gpu_device_num is not None


def _addresses(machine: Any) -> tuple[str, ...]:
    """The addresses, in order, from OneFlow's list of dicts, a list of strings or one string with commas."""
    example = 'machine=[{"addr": "192.168.1.12"}, {"addr": "192.168.1.11"}]'
    entries = machine.split(",") if isinstance(machine, str) else machine
    if not isinstance(entries, (list, tuple)) or not entries:
        raise UsageError(f"machine is {machine!r}, it must be a list of nodes: {example}")
    addresses = []
    for entry in entries:
        if isinstance(entry, dict) and set(entry) != {"addr"}:
            raise UsageError(f'machine holds {entry!r}, a node has one key, "addr": {example}')
        address = entry["addr"] if isinstance(entry, dict) else entry
        if not isinstance(address, str) or not address.strip():
            raise UsageError(f"machine holds {entry!r}, which is no address: {example}")
        addresses.append(address.strip())
    return tuple(addresses)


def plan(job: Job) -> Sequence[Process]:
    """This node's processes. With a machine list their ranks go on where the nodes before this one end."""
    from unidist.plugin import LaunchError, build_options

    if job.servers:
        raise LaunchError("backend 'oneflow' has no servers: leave --servers out")
    options = build_options(plugin, job.options)
    if options.gpu_device_num not in (None, job.nproc):
        raise LaunchError(
            f"--nproc is {job.nproc} and gpu_device_num is {options.gpu_device_num}: both are the number of processes "
            f"on each node, so give --nproc {options.gpu_device_num}, or leave gpu_device_num out"
        )
    if options.machine is None:
        return [Process("worker", rank, job.command, host=job.host) for rank in range(job.nproc)]
    from unidist_oneflow.machines import world_of

    processes = []
    for local_rank in range(job.nproc):
        world = world_of(options, local_rank, job.nproc)
        place = {
            "RANK": world.rank,
            "WORLD_SIZE": world.world_size,
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": job.nproc,
            "NODE_RANK": world.node_rank,
            "NUM_NODES": world.num_nodes,
            "MASTER_ADDR": world.master_addr,
            "MASTER_PORT": world.master_port,
        }
        env = {f"UNIDIST_{name}": str(value) for name, value in place.items()}
        env |= {name: str(value) for name, value in place.items() if name not in ("NODE_RANK", "NUM_NODES")}
        if world.num_nodes > 1:
            env["UNIDIST_CONTROL"] = ""  # each node has a launcher of its own, so rank 0 brings up the control plane
        host = options.machine[world.node_rank]
        processes.append(Process("worker", local_rank, job.command, env=env, host=host))
    return processes


def place(found: World, options: OneFlowOptions) -> World:
    from unidist_oneflow import machines

    return machines.place(found, options)


MIRRORED = Capabilities(
    mixed_precision="OneFlow 0.9 cannot multiply float16 or bfloat16 matrices on a CPU: train in float32",
    compression="OneFlow's all-reduce takes gradients as they are: leave it out, or exchange less with sync_every=",
    compile="in OneFlow a compiled step is an nn.Graph of global tensors: use view='consistent'",
    gpu="written for CUDA, not run by the tests: they have no GPU",
)
CONSISTENT = replace(
    MIRRORED,
    compile=True,
    spelled_out=(
        "in the consistent view local batches and a global model only meet inside a step: use train_step, or "
        "view='mirrored'"
    ),
    local_sgd="in the consistent view a parameter is one global tensor, the same on every rank: use view='mirrored'",
)


def capabilities(options: OneFlowOptions, workers: int | None = None) -> Capabilities:
    return CONSISTENT if options.view == "consistent" else MIRRORED


plugin = Plugin(
    name="oneflow",
    backend="unidist_oneflow.backend:connect",
    options=OneFlowOptions,
    requires=("oneflow",),
    own_options=("node_rank", "verbose"),
    capabilities=MIRRORED,
    capabilities_for=capabilities,
    plan=plan,
    place=place,
    bench="unidist_oneflow.bench",
    bench_launch="unidist_oneflow.bench_launch",
    recipe=RECIPE,
    interface_variables=("NCCL_SOCKET_IFNAME",),
    echoes=("Socket closed",),
    names=ArrayNames(extra={"num_batches_tracked": "int64"}),
)

"""The MXNet backend's declaration. Nothing here imports mxnet: the launcher reads this file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from unidist.plugin import Capabilities, Plugin, UsageError, check_choice, check_positive, check_seconds, check_whole
from unidist_mxnet.cluster import company
from unidist_mxnet.launcher import LAUNCHER
from unidist_mxnet.plan import plan
from unidist_mxnet.recipe import RECIPE

KVStore = Literal["auto", "dist_sync", "dist_device_sync", "dist_async", "local", "device"]
MemoryCheck = Literal["refuse", "warn"]


@dataclass(frozen=True)
class MxnetOptions:
    """
    kvstore           "auto" is dist_sync where there is a scheduler, else local. The others as MXNet has them
    devices           of each worker: how many, or their names, such as ["cpu(0)", "cpu(1)"]
    servers           parameter servers, for `unidist.launch`; the same as `unidist run --servers`
    update_on         "worker" or "server"; "auto" is the worker, and the server in dist_async, where it must be
    compression       "2bit" sends each gradient as -threshold, 0 or +threshold and keeps the rest for the next step
    bigarray_bound    arrays of more elements than this are shared out over the servers
    worker_cores, server_cores    what one of them may use; 0 leaves it open. `--dry-run` adds them up
    server_memory     GB that one server may use; 0 is what its host has
    server_memory_check    "refuse" a model that does not fit there, or "warn" and go on
    """

    kvstore: KVStore = "auto"
    devices: int | list[str] = 1
    servers: int = 0
    update_on: str = "auto"
    compression: str = "none"
    compression_threshold: float = 0.5
    bigarray_bound: int = 1_000_000
    collective_timeout: float = 1800.0  # seconds that a rank waits inside a collective for the others
    worker_cores: int = 0
    server_cores: int = 0
    server_memory: float = 0.0
    server_memory_check: MemoryCheck = "refuse"

    def __post_init__(self) -> None:
        # MXNet looks for parts of the name only: dist_snyc would mean dist_sync to it, without a word.
        check_choice("kvstore", self.kvstore, get_args(KVStore))
        check_choice("update_on", self.update_on, ("auto", "worker", "server"))
        check_choice("compression", self.compression, ("none", "2bit"))
        check_choice("server_memory_check", self.server_memory_check, get_args(MemoryCheck))
        check_positive("compression_threshold", self.compression_threshold)
        object.__setattr__(self, "collective_timeout", check_seconds("collective_timeout", self.collective_timeout))
        if self.server_memory != 0:
            check_positive("server_memory", self.server_memory)
        for name, least in (("bigarray_bound", 1), ("servers", 0), ("worker_cores", 0), ("server_cores", 0)):
            check_whole(name, getattr(self, name), least)
        if isinstance(self.devices, (list, tuple)):
            if not self.devices or not all(isinstance(device, str) for device in self.devices):
                raise UsageError(
                    f'devices is {self.devices!r}: name them, such as ["cpu(0)", "cpu(1)"], or say how many'
                )
        else:
            check_whole("devices", self.devices, 1)
        if self.update_on == "worker" and self.kvstore == "dist_async":
            raise UsageError(
                "update_on='worker' cannot be with dist_async: its servers apply each gradient as it comes"
            )
        if self.update_on == "server" and self.kvstore in ("local", "device"):
            raise UsageError(f"update_on='server' needs a dist_* kvstore, {self.kvstore!r} has no servers")
        if self.compression != "none" and self.kvstore in ("local", "device"):
            raise UsageError(f"compression is for the network, and kvstore {self.kvstore!r} uses none: leave it out")

    @property
    def device_count(self) -> int:
        return self.devices if isinstance(self.devices, int) else len(self.devices)

    @property
    def asynchronous(self) -> bool:
        return self.kvstore == "dist_async"

    @property
    def server_updates(self) -> bool:
        return self.update_on == "server" or self.asynchronous


def capabilities(options: MxnetOptions, workers: int | None = None) -> Capabilities:
    """What is promised depends on the mode, and on how many workers there are; None: not known yet."""
    promised = {
        "gpu": "written for CUDA builds of MXNet, not run by the tests: they have no GPU",
        "sync_batchnorm": (
            "MXNet's SyncBatchNorm covers the devices of one worker only: put gluon.contrib.nn.SyncBatchNorm into the "
            "model for those, or make the batch of each device larger"
        ),
        "mixed_precision": (
            "MXNet 1.9 switches precision for the whole process, not for one model, and computes float16 on GPUs only: "
            "call model.cast('float16') there, with multi_precision=True in an mx.optimizer one"
        ),
        "compression": "the KVStore has a compression of its own: use the option compression='2bit'",
    }
    if options.device_count > 1:
        promised["spelled_out"] = "one process drives several devices here: use train_step, which splits the batch"
    if options.server_updates:
        promised["clip_norm"] = (
            "the servers update each parameter by itself and never see the whole gradient: use update_on='worker' "
            "with dist_sync or dist_device_sync"
        )
        if options.compression != "none":
            promised["optimizer_state"] = (
                "the servers hold it, and all that is sent to them is compressed to 2 bits: leave compression out, or "
                "use update_on='worker' with dist_sync or dist_device_sync, or save the model alone"
            )
        promised["local_sgd"] = (
            "the servers hold the parameters, so no worker can go on alone: use update_on='worker' with dist_sync"
        )
    if options.compression != "none":
        promised["synchronous"] = "gradients are rounded to 2 bits: leave compression out for exact steps"
    if options.asynchronous and workers != 1:  # nobody else changes the parameters of the only one
        promised["synchronous"] = promised["lockstep"] = (
            "dist_async applies each worker's gradient as it comes, to parameters that others may have changed since: "
            "use dist_sync or dist_device_sync for the serial step"
        )
    return Capabilities(**promised)


plugin = Plugin(
    name="mxnet",
    backend="unidist_mxnet.backend:MxnetBackend",
    options=MxnetOptions,
    requires=("mxnet",),
    capabilities=capabilities(MxnetOptions()),
    capabilities_for=capabilities,
    launcher=LAUNCHER,
    plan=plan,
    company=company,
    bench="unidist_mxnet.bench",
    bench_launch="unidist_mxnet.bench_launch",
    recipe=RECIPE,
    interface_variables=("DMLC_INTERFACE",),
    echoes=("Socket closed",),
    serve="unidist_mxnet.services:serve",
)

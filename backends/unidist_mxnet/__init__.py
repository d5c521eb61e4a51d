"""The MXNet backend's declaration. Nothing here imports mxnet: the launcher reads this file."""

from __future__ import annotations

from dataclasses import dataclass

from unidist import Capabilities, Plugin
from unidist.errors import UsageError
from unidist_mxnet.plan import plan

STORES = ("auto", "dist_sync", "dist_device_sync", "dist_async", "local", "device")


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
    server_memory     GB that one server may use, for the warning that the model does not fit; 0 is what its host has
    """

    kvstore: str = "auto"
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

    def __post_init__(self) -> None:
        # MXNet looks for parts of the name only: dist_snyc would mean dist_sync to it, without a word.
        _one_of("kvstore", self.kvstore, STORES)
        _one_of("update_on", self.update_on, ("auto", "worker", "server"))
        _one_of("compression", self.compression, ("none", "2bit"))
        _number("compression_threshold", self.compression_threshold, above=0)
        _number("collective_timeout", self.collective_timeout, above=0)
        if self.server_memory != 0:
            _number("server_memory", self.server_memory, above=0)
        for name, least in (("bigarray_bound", 1), ("servers", 0), ("worker_cores", 0), ("server_cores", 0)):
            _whole(name, getattr(self, name), least)
        if isinstance(self.devices, (list, tuple)):
            if not self.devices or not all(isinstance(each, str) for each in self.devices):
                raise UsageError(
                    f'devices is {self.devices!r}: name them, such as ["cpu(0)", "cpu(1)"], or say how many'
                )
        else:
            _whole("devices", self.devices, 1)
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


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{name} is {value!r}, it must be one of {', '.join(choices)}")


def _number(name: str, value: object, above: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > above:
        raise UsageError(f"{name} is {value!r}, it must be a number above {above}")


def _whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name} is {value!r}, it must be a whole number from {least}")


def capabilities(options: MxnetOptions) -> Capabilities:
    """What is promised depends on the mode."""
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
        promised["optimizer_state"] = (
            "the servers hold it, and MXNet cannot read it back: save the model alone, or use update_on='worker' with "
            "dist_sync or dist_device_sync"
        )
        promised["local_sgd"] = (
            "the servers hold the parameters, so no worker can go on alone: use update_on='worker' with dist_sync"
        )
    if options.compression != "none":
        promised["synchronous"] = "gradients are rounded to 2 bits: leave compression out for exact steps"
    if options.asynchronous:
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
    implied_by="DMLC_ROLE",
    plan=plan,
    bench="unidist_mxnet.bench",
    serve="unidist_mxnet.roles:serve",
)

"""The Horovod backend's declaration. Nothing here imports Horovod: the launcher reads this file."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from unidist.plugin import Capabilities, Plugin, UsageError, check_choice, is_number
from unidist_horovod.launcher import LAUNCHER
from unidist_horovod.recipe import RECIPE
from unidist_mxnet import plugin as mxnet

FRAMEWORKS = ("torch", "mxnet")
STALL_WARNING = "60"  # seconds: Horovod's own
MOST_FUSION, LEAST_CYCLE, MOST_CYCLE = 1024, 0.1, 1000  # MB, ms, ms


@dataclass(frozen=True)
class HorovodOptions:
    """
    framework             what models are written in; not given, what this Horovod was built for, torch if both
    fusion_threshold_mb   gradients are joined up to this size before they travel, at most 1024; 0 sends each by itself
    cycle_time_ms         how long Horovod waits for more of them, from 0.1 to 1000
    timeline              a file for Horovod's timeline, to be opened in chrome://tracing; rank 0 writes it
    stall_warning         seconds after which Horovod names the tensors and ranks that others wait for; 0 never does
    stall_shutdown        seconds after which it ends the job instead, from stall_warning up; 0 never does

    Horovod looks for stalls once in each stall_warning seconds, so it may take twice as long. Built by others than
    `unidist setup horovod`, 0.28.1 finds them over MPI only: over gloo it has no list of the ranks.

    What is not given is as Horovod has it, or as its own variables (HOROVOD_FUSION_THRESHOLD, …) say; except that its
    messages, with its warnings of stalls, are only shown where stalls or HOROVOD_LOG_LEVEL were asked for.
    """

    framework: str | None = None
    fusion_threshold_mb: float | None = None
    cycle_time_ms: float | None = None
    timeline: str | None = None
    stall_warning: float | None = None
    stall_shutdown: float | None = None

    def __post_init__(self) -> None:
        if self.framework is not None:
            check_choice("framework", self.framework, FRAMEWORKS)
        if self.timeline is not None and (not isinstance(self.timeline, str) or not self.timeline):
            raise UsageError(f"timeline is {self.timeline!r}, it must be the path of a file")
        for name in ("fusion_threshold_mb", "cycle_time_ms", "stall_warning", "stall_shutdown"):
            value = getattr(self, name)
            if value is not None and not is_number(value, 0):
                raise UsageError(f"{name} is {value!r}, it must be a number from 0")
        if self.fusion_threshold_mb is not None and self.fusion_threshold_mb > MOST_FUSION:
            raise UsageError(
                f"fusion_threshold_mb is {self.fusion_threshold_mb}, and so large would be Horovod's buffer: take "
                f"{MOST_FUSION} or less"
            )
        if self.cycle_time_ms is not None and not LEAST_CYCLE <= self.cycle_time_ms <= MOST_CYCLE:
            raise UsageError(
                f"cycle_time_ms is {self.cycle_time_ms}: below {LEAST_CYCLE} Horovod would never rest, and each step "
                f"may wait as long as it says, so take at most {MOST_CYCLE}"
            )
        for name in ("stall_warning", "stall_shutdown"):
            if (getattr(self, name) or 0) % 1:
                raise UsageError(f"{name} is {getattr(self, name)!r}, Horovod counts whole seconds here")
        warning = _stall_warning_of_variables() if self.stall_warning is None else self.stall_warning
        if self.stall_shutdown and not 0 < warning <= self.stall_shutdown:
            raise UsageError(
                f"stall_shutdown is {self.stall_shutdown}, but stall_warning is {warning}: Horovod ends no stall that "
                "it has not warned of, so give a stall_warning from 1 to stall_shutdown"
            )

    def variables(self) -> dict[str, str]:
        """The same as Horovod's own environment variables."""
        said: dict[str, str] = {}
        if self.fusion_threshold_mb is not None:
            said["HOROVOD_FUSION_THRESHOLD"] = str(int(self.fusion_threshold_mb * 2**20))
        if self.cycle_time_ms is not None:
            said["HOROVOD_CYCLE_TIME"] = str(self.cycle_time_ms)
        if self.timeline is not None:
            said["HOROVOD_TIMELINE"] = self.timeline
        if self.stall_warning is not None:
            said["HOROVOD_STALL_CHECK_DISABLE"] = "0" if self.stall_warning else "1"
            said["HOROVOD_STALL_CHECK_TIME_SECONDS"] = str(max(1, int(self.stall_warning)))
        if self.stall_shutdown is not None:
            said["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = str(int(self.stall_shutdown))
        return said


def _stall_warning_of_variables() -> int:
    """What Horovod goes by if no option is given."""
    if os.environ.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0"):
        return 0
    said = os.environ.get("HOROVOD_STALL_CHECK_TIME_SECONDS", STALL_WARNING)
    if not said.isdecimal():
        raise UsageError(f"HOROVOD_STALL_CHECK_TIME_SECONDS is {said!r}, it must be a whole number of seconds")
    return int(said)


ON_TORCH = Capabilities(gpu="written for Horovod with NCCL, not run by the tests: they have no GPU")
ON_MXNET = replace(
    mxnet.capabilities,
    sync_batchnorm=(
        "neither MXNet nor Horovod has it for Gluon over processes: make the batch of each rank larger, or use "
        "framework='torch'"
    ),
    compression="it is there for torch models only: use framework='torch', or accumulate= to send less often",
    gpu=ON_TORCH.gpu,
)


def capabilities(options: HorovodOptions, workers: int | None = None) -> Capabilities:
    return ON_MXNET if options.framework == "mxnet" else ON_TORCH


plugin = Plugin(
    name="horovod",
    backend="unidist_horovod.backend:connect",
    options=HorovodOptions,
    requires=("horovod",),
    capabilities=ON_TORCH,
    capabilities_for=capabilities,
    launcher=LAUNCHER,
    bench="unidist_horovod.bench",
    bench_launch="unidist_horovod.bench_launch",
    recipe=RECIPE,
    interface_variables=("HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"),
    echoes=("has been shut down", "Socket closed"),
)

"""Everything that a backend may import of unidist. `unidist.backend` says what to write, this is what helps with it.

    from unidist.plugin import Backend, Capabilities, Plugin, World

A backend imports nothing else of unidist; its benchmarks, which are programs such as users write, may `import unidist`.
What is not in `__all__` may change with any release.

The launcher reads a backend's declaration on interpreters that have no framework, and not even numpy. So what needs
numpy, or takes long to load, is imported when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# The imports are in the order of their subjects.
# isort: off

# The contract, and what users give to it.
from unidist.backend import ArrayNames, Backend, Capabilities, Features, MicroBatch, Plugin, Reduction, Update
from unidist.compression import Compression, PowerSGD, TopK
from unidist.optim import SGD, Adam, AdamW, OptimizerSpec
from unidist.world import World

# What to raise, and checks of what users give.
from unidist.errors import (
    BackendUnavailable,
    CheckpointError,
    CommunicationError,
    LaunchError,
    PeerFailed,
    RanksDisagree,
    RanksMissing,
    StateError,
    UnidistError,
    UnsupportedOperation,
    UsageError,
    WorldError,
    single_row,
)
from unidist.checks import LONGEST_WAIT, check_choice, check_flag, check_positive, check_seconds, check_whole
from unidist.checks import check_own_parameters, device_kind, is_number, is_whole

# The environment that `unidist setup` builds (`Plugin.recipe`).
from unidist.setup.recipes import NEEDED, Recipe, SourceBuild, Stage

# The processes of a job (`Plugin.plan`), and their options.
from unidist.launch.plan import Job, Process
from unidist.registry import build_options

# The engine's own launcher (`Plugin.launcher`), and where the ranks are.
from unidist import network
from unidist.world import detect
from unidist.world.launcher import Launcher, number_in, whole_number
from unidist.world.variables import Variables, check_rank, master_at
from unidist.world.world import Place

# isort: on

if TYPE_CHECKING:
    from unidist.alike import facts
    from unidist.bench.launch import Start, natively_or_by_strategy, ranks_by_hand
    from unidist.checkpoint import expect
    from unidist.checkpoint.names import check_range, check_tied
    from unidist.control import Cause, Control, ending, parting
    from unidist.control.company import Company, WentOn
    from unidist.control.host import Host
    from unidist.control.lifeline import Lifeline, end_process, say
    from unidist.control.meeting import Meeting
    from unidist.control.peers import Peers
    from unidist.control.protocol import bind, url
    from unidist.control.watch import Watch
    from unidist.data import torch_shaped
    from unidist.data.nested import arrays_of, items_of, leaves_of, map_leaves
    from unidist.data.source import NativeLoader, elements_of
    from unidist.launch.ports import holder
    from unidist.launch.processes import gpus
    from unidist.testing.reference import SIZES
    from unidist.training.pace import Pace

_LATE = {
    # Batches, and the framework's own data loaders.
    "unidist.data": ("torch_shaped",),
    "unidist.data.nested": ("arrays_of", "items_of", "leaves_of", "map_leaves"),
    "unidist.data.source": ("NativeLoader", "elements_of"),
    # What a checkpoint holds: it is checked before it is used.
    "unidist.checkpoint": ("expect",),
    "unidist.checkpoint.names": ("check_range", "check_tied"),
    # The other ranks, outside of the engine (`World.peers`).
    "unidist.control.peers": ("Peers",),
    # Engines that queue steps, that have processes beside the workers, or that need a watchman while they hold Python's
    # lock.
    "unidist.training.pace": ("Pace",),
    "unidist.alike": ("facts",),
    "unidist.control": ("Cause", "Control", "ending", "parting"),
    "unidist.control.company": ("Company", "WentOn"),
    "unidist.control.host": ("Host",),
    "unidist.control.lifeline": ("Lifeline", "end_process", "say"),
    "unidist.control.meeting": ("Meeting",),
    "unidist.control.protocol": ("bind", "url"),
    "unidist.control.watch": ("Watch",),
    "unidist.launch.ports": ("holder",),
    "unidist.launch.processes": ("gpus",),
    # Benchmarks, and the conformance suite.
    "unidist.bench.launch": ("Start", "natively_or_by_strategy", "ranks_by_hand"),
    "unidist.testing.reference": ("SIZES",),
}
_HOMES = {name: module for module, names in _LATE.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(_HOMES[name])
    if not hasattr(module, name):  # a module of a package
        return importlib.import_module(f"{_HOMES[name]}.{name}")
    return getattr(module, name)


__all__ = [
    "LONGEST_WAIT",
    "NEEDED",
    "SGD",
    "SIZES",
    "Adam",
    "AdamW",
    "ArrayNames",
    "Backend",
    "BackendUnavailable",
    "Capabilities",
    "Cause",
    "CheckpointError",
    "CommunicationError",
    "Company",
    "Compression",
    "Control",
    "Features",
    "Host",
    "Job",
    "LaunchError",
    "Launcher",
    "Lifeline",
    "Meeting",
    "MicroBatch",
    "NativeLoader",
    "OptimizerSpec",
    "Pace",
    "PeerFailed",
    "Peers",
    "Place",
    "Plugin",
    "PowerSGD",
    "Process",
    "RanksDisagree",
    "RanksMissing",
    "Recipe",
    "Reduction",
    "SourceBuild",
    "Stage",
    "Start",
    "StateError",
    "TopK",
    "UnidistError",
    "UnsupportedOperation",
    "Update",
    "UsageError",
    "Variables",
    "Watch",
    "WentOn",
    "World",
    "WorldError",
    "arrays_of",
    "bind",
    "build_options",
    "check_choice",
    "check_flag",
    "check_own_parameters",
    "check_positive",
    "check_range",
    "check_rank",
    "check_seconds",
    "check_tied",
    "check_whole",
    "detect",
    "device_kind",
    "elements_of",
    "end_process",
    "ending",
    "expect",
    "facts",
    "gpus",
    "holder",
    "is_number",
    "is_whole",
    "items_of",
    "leaves_of",
    "map_leaves",
    "master_at",
    "natively_or_by_strategy",
    "network",
    "number_in",
    "parting",
    "ranks_by_hand",
    "say",
    "single_row",
    "torch_shaped",
    "url",
    "whole_number",
]

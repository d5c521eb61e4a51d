"""One training loop on PyTorch DDP, MXNet KVStore, OneFlow and Horovod, with the same numbers on each.

Importing this loads no framework and not numpy; a backend is loaded when a `Strategy` starts.
"""

from typing import TYPE_CHECKING

from unidist._version import __version__
from unidist.backend import Backend, Capabilities, Features, MicroBatch, Plugin, Update
from unidist.compression import PowerSGD, TopK
from unidist.errors import UnidistError
from unidist.optim import SGD, Adam, AdamW, OptimizerSpec
from unidist.strategy import Strategy
from unidist.world import World

if TYPE_CHECKING:
    from unidist.launch.inline import launch
else:
    from unidist import launch  # a package that can be called

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Backend",
    "Capabilities",
    "Features",
    "MicroBatch",
    "OptimizerSpec",
    "Plugin",
    "PowerSGD",
    "Strategy",
    "TopK",
    "UnidistError",
    "Update",
    "World",
    "__version__",
    "launch",
]

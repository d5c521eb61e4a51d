"""From a job to its processes: plan, supervisor, output. The package is also the function `unidist.launch`."""

import inspect
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from unidist.launch.inline import launch


class _Launch(ModuleType):
    """`unidist.launch(fn, nproc=2)` and `unidist.launch.plan` are both wanted, and one name cannot be two things: it is
    a module that can be called."""

    __call__ = staticmethod(launch)
    __signature__ = inspect.signature(launch)  # for notebooks, which show it

    def __reduce__(self) -> tuple[Any, ...]:
        """A function that calls it may travel by cloudpickle, which knows plain modules only."""
        return import_module, (__name__,)


sys.modules[__name__].__class__ = _Launch

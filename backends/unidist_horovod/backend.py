"""Horovod under the framework that was asked for, or that this Horovod was built for."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

from unidist.plugin import Backend, BackendUnavailable, World
from unidist_horovod import FRAMEWORKS, HorovodOptions

# Without these `import horovod.torch` works all the same, and every call in it fails.
NATIVE = {"torch": "mpi_lib_v2*.so", "mxnet": "mpi_lib*.so"}
ENGINES = {"torch": "unidist_horovod.on_torch:TorchOverHorovod", "mxnet": "unidist_horovod.on_mxnet:MxnetOverHorovod"}


def connect(world: World, options: HorovodOptions, device: str | None, timeout: float) -> Backend:
    module, _, name = ENGINES[choose(options.framework, built_for())].partition(":")
    try:
        engine: type[Backend] = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise BackendUnavailable(f"Horovod cannot be used on {sys.executable}: {error}. {REMEDY}") from error
    return engine(world, options, device, timeout)


REMEDY = (
    "Run `python -m unidist setup horovod`, which builds it with gloo for torch and MXNet, and start the script with "
    "`python -m unidist run --backend horovod …`."
)


def built_for() -> list[str]:
    """The frameworks whose native library this Horovod holds, found without importing it."""
    spec = importlib.util.find_spec("horovod")
    folders = [Path(location) for location in (spec.submodule_search_locations or ())] if spec else []
    return [name for name in FRAMEWORKS if any(list((folder / name).glob(NATIVE[name])) for folder in folders)]


def choose(asked: str | None, built: list[str]) -> str:
    if not built:
        raise BackendUnavailable(f"this Horovod has no native library: it was installed without a compiler. {REMEDY}")
    if asked is not None and asked not in built:
        raise BackendUnavailable(f"this Horovod was built for {', '.join(built)}, not for {asked}. {REMEDY}")
    return asked or built[0]

"""Which interpreter runs a backend, and how this very unidist gets into it."""

from __future__ import annotations

import atexit
import difflib
import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from unidist import registry
from unidist._version import __version__
from unidist.backend import Plugin
from unidist.errors import LaunchError, UsageError
from unidist.setup import pythons, recipes, store

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def interpreter_for(backend: str) -> tuple[str, dict[str, str]]:
    """(python, variables to set) for processes of `backend`: the running interpreter if it has the framework, else the
    environment that `unidist setup` made."""
    plugin = registry.plugin(backend)
    absent = registry.missing(plugin)
    if not absent:
        return sys.executable, importable()
    recipe = recipes.recipe_of(backend)
    environment = store.find(recipe, backend) if recipe else None
    if environment:
        lost = [module for module in plugin.requires if not environment.has(module)]
        if lost:
            raise LaunchError(
                f"{environment.path} has lost {', '.join(lost)}. Build it again: `{command()} setup {backend} --force`"
            )
        return str(environment.python), {**environment.variables(), **importable()}
    how = f"Run `{command()} setup {backend}` once." if recipe else "Install it there."
    raise LaunchError(f"backend {backend!r} needs {', '.join(absent)}, which {sys.executable} does not have. {how}")


def version_of(python: str) -> str:
    """ "3.10", of an interpreter that `interpreter_for` has named. It need not be started for that."""
    if python == sys.executable:
        return pythons.current()
    folder = next((Path(python).parent.parent / "lib").glob("python3.*"))  # every environment has exactly one
    return folder.name.removeprefix("python")


def by_hand(name: str) -> tuple[store.Environment, dict[str, str]]:
    """An environment that `unidist setup` made, and all variables of a process that uses it."""
    recipe = recipes.recipe_of(name)
    if recipe is None:
        near = difflib.get_close_matches(name, recipes.names(), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"there is no environment {name!r}.{hint} Known: {', '.join(recipes.names())}")
    environment = store.find(recipe, name)
    if environment is None:
        raise LaunchError(f"{name} is not set up. Run `{command()} setup {name}` once.")
    variables = {**os.environ, **environment.variables(), **importable(), "VIRTUAL_ENV": str(environment.path)}
    variables["PATH"] = os.pathsep.join([str(environment.python.parent), *os.get_exec_path()])
    variables.pop("PYTHONHOME", None)
    return environment, variables


def choose(name: str | None) -> tuple[Plugin, str]:
    """Which backend, and why. Where this interpreter has no framework, the environments that were set up decide."""
    if name or os.environ.get("UNIDIST_BACKEND"):
        return registry.choose(name)
    known = registry.loadable()
    if not all(map(registry.missing, known)):
        return registry.choose(name)
    found = {p.name: p for p in known if (recipe := recipes.recipe_of(p.name)) and store.find(recipe, p.name)}
    if registry.DEFAULT in found or len(found) == 1:
        return found.get(registry.DEFAULT) or found.popitem()[1], "it is set up"
    state = f"set up: {', '.join(found)}" if found else f"none is set up; `{command()} setup NAME` does that"
    raise UsageError(f"which backend? Name one of {', '.join(p.name for p in known)} ({state}).")


def command() -> str:
    """How the user calls us: by the installed command, or out of a clone."""
    return "unidist" if os.path.basename(sys.argv[0]) == "unidist" else "python -m unidist"


# -- this unidist, in another interpreter --------------------------------------------------------------------------


def importable() -> dict[str, str]:
    """PYTHONPATH with which any interpreter finds this unidist and every registered backend, and nothing else of ours:
    a directory of links. Our own site-packages there would carry packages of the wrong version along."""
    path = os.pathsep.join([str(overlay()), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path}


def overlay() -> Path:
    entries = list(registry.entries().values())
    links = {"unidist": Path(__file__).resolve().parent.parent, **dict(_packages(entries))}
    table = "".join(f"{entry.name} = {entry.value}\n" for entry in entries)
    key = hashlib.sha256(repr((sorted(links.items()), table, __version__)).encode()).hexdigest()[:12]
    place = store.home() / "overlays" / key
    try:
        if not (place / "unidist").exists():
            _link(place, links, table)
    except OSError:  # a cache that cannot be written. No fixed place elsewhere: anybody could have made it before us.
        place = Path(tempfile.mkdtemp(prefix="unidist-")) / key
        atexit.register(shutil.rmtree, place.parent, ignore_errors=True)
        _link(place, links, table)
    return place


def _link(place: Path, links: dict[str, Path], table: str) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=place.parent))
    aside.chmod(0o755)  # the cache may be shared by several users
    for name, target in links.items():
        (aside / name).symlink_to(target)
    info = aside / f"unidist_train-{__version__}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: unidist-train\nVersion: {__version__}\n")
    (info / "entry_points.txt").write_text(f"[{registry.GROUP}]\n{table}")
    try:
        aside.rename(place)
    except OSError:  # another process was faster
        shutil.rmtree(aside)


def _packages(entries: list[EntryPoint]) -> Iterator[tuple[str, Path]]:
    for entry in entries:
        spec = importlib.util.find_spec(entry.module.partition(".")[0])
        if spec and spec.origin:
            origin = Path(spec.origin).resolve()
            path = origin.parent if spec.submodule_search_locations else origin
            yield path.name, path

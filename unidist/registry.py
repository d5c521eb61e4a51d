"""Backend name -> `Plugin`, by the entry-point group "unidist.backends". Nothing is loaded before it is asked for."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from unidist.backend import Backend, Plugin
from unidist.checks import did_you_mean
from unidist.errors import BackendUnavailable, UnidistError, UnknownBackend, UnknownOption, UsageError, WorldError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from unidist.world import World

GROUP = "unidist.backends"

_loaded: dict[str, Plugin] = {}


def names() -> list[str]:
    return sorted(entries())


def plugin(name: str) -> Plugin:
    """The declaration of backend `name`; its framework is not imported."""
    if name not in _loaded:
        found = entries()
        if name not in found:
            hint = did_you_mean(name, found) or _as_an_option(name)
            raise UnknownBackend(f"no backend is called {name!r}.{hint} Known: {', '.join(sorted(found)) or 'none'}.")
        try:
            loaded = found[name].load()
        except Exception as error:  # whatever importing somebody's module raises
            raise BackendUnavailable(
                f"backend {name!r} ({found[name].value}) cannot be loaded: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(loaded, Plugin) or loaded.name != name:
            raise UnidistError(
                f"the entry point {name} = {found[name].value} must name a unidist.Plugin called {name!r}, "
                f"it gives {loaded!r}"
            )
        _loaded[name] = loaded
    return _loaded[name]


def _as_an_option(word: str) -> str:
    """Users of an engine may name what is an option here: advice for each backend that has one with that value."""
    uses = [
        f"Strategy({name!r}, {option}={word!r}), or `unidist run --backend {name} --option {option}={word}`"
        for name, backend in ((backend.name, backend) for backend in loadable())
        for option, words in choices(backend).items()
        if word in words
    ]
    return f" It is a value of an option: {'; or '.join(uses)}." if uses else ""


def choices(plugin: Plugin) -> dict[str, tuple[Any, ...]]:
    """The options that take one of a few words, which their type says: `transport: Literal["tcp", "ib"]`."""
    try:
        hints = get_type_hints(plugin.options)
    except NameError:  # a type that its module imports for type checkers only
        return {}
    return {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}


def loadable() -> list[Plugin]:
    """The declarations of all backends but those that are broken: they say so when they are asked for by name."""
    found = []
    for name in names():
        with contextlib.suppress(UnidistError):
            found.append(plugin(name))
    return found


def missing(plugin: Plugin) -> list[str]:
    """Which of the modules that the backend needs are not installed for this interpreter."""
    return [module for module in plugin.requires if module not in sys.modules and not _installed(module)]


def _installed(module: str) -> bool:
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None  # a mere directory of that name is no framework


def backend_class(plugin: Plugin) -> type[Backend]:
    """Import the backend itself, and with it the framework."""
    absent = missing(plugin)
    module, _, attribute = plugin.backend.partition(":")
    try:
        if absent:
            raise ModuleNotFoundError(f"No module named {absent[0]!r}", name=absent[0])
        backend: type[Backend] = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise BackendUnavailable(
            f"backend {plugin.name!r} cannot start on {sys.executable}: {error}. "
            f"Run `python -m unidist setup {plugin.name}`, then start the script with "
            f"`python -m unidist run --backend {plugin.name} …`, which uses that environment."
        ) from error
    return backend


def serve(plugin: Plugin, world: World, options: Any, timeout: float) -> NoReturn:
    """A scheduler or server that runs the user's script: it meets the others, serves, and ends here.

    Training code is never reached.
    """
    if plugin.serve is None:
        raise WorldError(
            f"this process is a {world.role} ({world.reason}), and backend {plugin.name!r} has only workers: "
            "start it with a backend that has such roles, or unset the variable"
        )
    from unidist.alike import facts
    from unidist.control.watch import Watch

    module, _, function = plugin.serve.partition(":")
    company = plugin.company(world, options) if plugin.company is not None else None
    watch = None if company is None else Watch(world, facts(plugin, options), timeout, company)
    getattr(importlib.import_module(module), function)(watch.meet() if watch else world, options)
    if watch is not None:
        watch.close()
    sys.exit(0)


def build_options(plugin: Plugin, given: Mapping[str, Any]) -> Any:
    """The backend's options dataclass from keyword arguments; a misspelt name is answered with the right one."""
    known = [field.name for field in fields(plugin.options)]
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known)
            raise UnknownOption(
                f"backend {plugin.name!r} has no option {name!r}.{hint} Its options: {', '.join(known)}."
            )
    try:
        return plugin.options(**given)
    except (TypeError, ValueError) as error:
        raise error if isinstance(error, UnidistError) else UsageError(f"backend {plugin.name!r}: {error}") from error


def choose(name: str | None, env: Mapping[str, str] = os.environ) -> tuple[Plugin, str]:
    """Which backend, and why: the argument, UNIDIST_BACKEND, the launcher's variables, what is installed."""
    if name is not None:
        return plugin(name), "named in the call"
    if env.get("UNIDIST_BACKEND"):
        return plugin(env["UNIDIST_BACKEND"]), "UNIDIST_BACKEND"
    known = loadable()
    for candidate in known:
        if candidate.launcher and candidate.launcher.marker in env:
            return candidate, f"{candidate.launcher.marker} is set"
    installed = [candidate for candidate in known if not missing(candidate)]
    if len(installed) == 1:
        return installed[0], "the only framework installed"
    for candidate in installed:
        if candidate.name == DEFAULT:
            return candidate, f"the default among {', '.join(p.name for p in installed)}"
    choices = ", ".join(candidate.name for candidate in installed or known)
    state = "several frameworks are installed" if installed else f"no framework is installed for {sys.executable}"
    raise UsageError(
        f'which backend? {state}. Name one of {choices}: Strategy("…") or `python -m unidist run --backend …`'
        + ("" if installed else "; `python -m unidist setup NAME` installs one")
        + "."
    )


DEFAULT = "torch"  # only ever a tie-break, and the start-up line says so


def entries() -> dict[str, EntryPoint]:
    """Every registered backend, as its entry point; nothing is loaded."""
    from importlib.metadata import entry_points  # not at the top: it would be half of the time of `import unidist`

    found: dict[str, EntryPoint] = {}
    for entry in [*entry_points(group=GROUP), *_source_tree()]:
        other = found.setdefault(entry.name, entry)
        if other.value != entry.value:
            raise UnidistError(
                f"two backends are called {entry.name!r}: {other.value} and {entry.value}. Uninstall one of them."
            )
    return found


def _source_tree() -> list[EntryPoint]:
    """In a clone that was never installed there is no metadata to ask: read the same table from pyproject.toml."""
    from importlib.metadata import EntryPoint

    root = Path(__file__).resolve().parent.parent
    project = root / "pyproject.toml"
    if not project.is_file() or not (root / "backends").is_dir():
        return []
    if str(root / "backends") not in sys.path:
        sys.path.append(str(root / "backends"))
    # tomllib came with Python 3.11; this one table is flat enough for a pattern.
    table = re.search(
        rf'^\[project\.entry-points\."{re.escape(GROUP)}"\]\n((?:\w+ = ".*"\n)*)', project.read_text(), re.M
    )
    rows = re.findall(r'^(\w+) = "(.*)"$', table.group(1), re.M) if table else []
    return [EntryPoint(name, value, GROUP) for name, value in rows]

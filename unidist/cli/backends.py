"""`unidist backends`: which backends there are, what each can do, and why one cannot start here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from importlib import metadata

from unidist import registry
from unidist.backend import Capabilities, Plugin
from unidist.cli.run import parse_options
from unidist.errors import BackendUnavailable, UsageError
from unidist.launch import environments
from unidist.setup import recipes, store


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "List the backends: framework version, environment, capabilities, and what is missing."
    parser.add_argument("backend", nargs="?", help="only this one, with its options as they are given here")
    parser.add_argument("-o", "--option", action="append", default=[], metavar="K=V", help="an option of the backend")
    parser.add_argument("--markdown", action="store_true", help="only the capabilities, as the table in the README")


def run(args: argparse.Namespace) -> int:
    if args.option and not args.backend:
        raise UsageError("name the backend that the options are for: unidist backends NAME --option K=V")
    plugins = [_with_options(args.backend, args.option)] if args.backend else registry.loadable()
    if args.markdown:
        print(markdown(plugins))
        return 0
    names = [args.backend] if args.backend else registry.names()
    rows = [("BACKEND", "FRAMEWORK", "ENVIRONMENT"), *((name, *_state(name)) for name in names)]
    print(_aligned(rows))
    print()
    print(_aligned(_capabilities(plugins)))
    notes = _notes(plugins)
    if notes:
        print("\n" + "\n".join(notes))
    return 0


def _with_options(name: str, given: Sequence[str]) -> Plugin:
    """The backend as it is with these options: they may change what it can do."""
    plugin = registry.plugin(name)
    options = registry.build_options(plugin, parse_options(plugin, given))
    if plugin.capabilities_for is None:
        return plugin
    return replace(plugin, capabilities=plugin.capabilities_for(options, None))


def _state(name: str) -> tuple[str, str]:
    """(framework and version, where it would run), or why it would not."""
    try:
        plugin = registry.plugin(name)
    except BackendUnavailable as error:
        return "-", f"not available: {error}"
    absent = registry.missing(plugin)
    if not absent:
        return ", ".join(f"{name} {_version(name)}" for name in plugin.requires), f"this interpreter ({sys.executable})"
    recipe = recipes.recipe_of(plugin.name)
    environment = store.find(recipe, plugin.name) if recipe else None
    if environment is None:
        how = f"run `{environments.command()} setup {plugin.name}`" if recipe else "install it"
        return "-", f"not available: no module {', '.join(absent)} here; {how}"
    versions = environment.ready()[plugin.name]["versions"]
    return ", ".join(f"{name} {versions.get(name, '?')}" for name in plugin.requires), str(environment.path)


def markdown(plugins: Sequence[Plugin]) -> str:
    header, *rows = _capabilities(plugins)
    lines = [header, ("---",) * len(header), *rows]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    notes = _notes(plugins)
    return table + ("\n\n" + "\n".join(f"- {note}" for note in notes) if notes else "")


def _capabilities(plugins: Sequence[Plugin]) -> list[tuple[str, ...]]:
    """One row for each capability; what is not there refers to a note."""
    numbers = {sentence: i for i, sentence in enumerate(_sentences(plugins), 1)}
    rows: list[tuple[str, ...]] = [("", *(plugin.name for plugin in plugins))]
    for field in fields(Capabilities):
        values = [getattr(plugin.capabilities, field.name) for plugin in plugins]
        cells = ("yes" if value is True else f"no ({numbers[value]})" for value in values)
        rows.append((field.name.replace("_", " "), *cells))
    return rows


def _notes(plugins: Sequence[Plugin]) -> list[str]:
    return [f"({i}) {sentence}" for i, sentence in enumerate(_sentences(plugins), 1)]


def _sentences(plugins: Sequence[Plugin]) -> list[str]:
    """Why something is not there, each sentence once, in the order of the table."""
    return list(
        dict.fromkeys(
            value
            for field in fields(Capabilities)
            for plugin in plugins
            if (value := getattr(plugin.capabilities, field.name)) is not True
        )
    )


def _version(module: str) -> str:
    try:
        return metadata.version(module)
    except metadata.PackageNotFoundError:
        return "(version unknown)"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    # By hand: importing rich.table takes 100 ms of processor time.
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )

"""What all processes of a job must have in common before an engine starts, as texts that people can compare."""

from __future__ import annotations

import hashlib
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from unidist._version import __version__
from unidist.backend import Plugin


def facts(plugin: Plugin, options: Any) -> dict[str, str]:
    """Nothing is imported for it: a framework's version is that of its distribution."""
    from importlib import metadata  # takes a while, and is not needed where there is one process

    versions = {}
    for module in plugin.requires:
        try:
            versions[f"the version of {module}"] = metadata.version(module)
        except metadata.PackageNotFoundError:
            versions[f"the version of {module}"] = "unknown"
    return {
        "the backend": plugin.name,
        "the version of unidist": __version__,
        "the version of Python": ".".join(map(str, sys.version_info[:2])),
        **versions,
        "the script": script(),
        "the options": describe(options, plugin.own_options),
    }


def script() -> str:
    """The main script's name and the beginning of its SHA-256."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    if path is None or not os.path.isfile(path):
        return "typed in"
    return f"{os.path.basename(path)} (sha256 {hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]})"


def describe(options: Any, without: tuple[str, ...]) -> str:
    """Those that differ from their defaults."""
    said = {field.name: getattr(options, field.name) for field in fields(options) if field.name not in without}
    usual = {field.name: field.default for field in fields(options)}
    return ", ".join(f"{name}={value!r}" for name, value in said.items() if value != usual[name]) or "none"

"""Packages small enough for a test to install: a module that knows its version."""

from __future__ import annotations

import zipfile
from pathlib import Path


def wheel(folder: Path, name: str, version: str, *requires: str) -> Path:
    info = f"{name}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {each}\n" for each in requires)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}.py", f"version = {version!r}\n")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    return path

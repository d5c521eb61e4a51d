"""What "known-good" means to the file: for each recipe and Python, the version and the hashes of every package.

pip is given the versions as constraints and reports the hash of each file that it takes; a file that is not in the lock
is refused before the environment counts as ready. pip's own --require-hashes cannot be used: it wants a hash for
everything, and torch's CPU build comes from another index than the lock's (or from a folder), with no hash known to us.
That one is pinned by its version only. Locks are written by `python -m unidist.setup.lock`. They are no part of a
recipe's key: a new lock decides what the next environment gets, and makes no proven one, and no built wheel, outdated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from unidist.errors import SetupError
from unidist.setup.recipes import Recipe


@dataclass(frozen=True)
class Locked:
    version: str
    hashes: frozenset[str]


def file(recipe: Recipe, python: str) -> Path:
    return Path(recipe.locks) / f"{recipe.name}-{python}.txt"


def read(recipe: Recipe, python: str) -> dict[str, Locked]:
    """Package -> what is locked; empty where the recipe has no lock for this Python."""
    path = file(recipe, python)
    if not recipe.locks or not path.is_file():
        return {}
    found = {}
    for entry in path.read_text().replace("\\\n", " ").splitlines():
        if pinned := re.match(r"([\w.-]+)==(\S+)", entry):
            hashes = frozenset(re.findall(r"--hash=sha256:([0-9a-f]{64})", entry))
            found[normal(pinned[1])] = Locked(pinned[2], hashes)
    return found


def normal(name: str) -> str:
    """A package's name as pip compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def check(report: Path, lock: Mapping[str, Locked]) -> None:
    """Raise unless every file that pip took is one of the lock's. A build of another index (2.13.0+cpu) has no hash
    there."""
    for item in json.loads(report.read_text())["install"]:
        name, version = normal(item["metadata"]["name"]), item["metadata"]["version"]
        hashes = item["download_info"].get("archive_info", {}).get("hashes", {})
        locked = lock.get(name)
        if locked and locked.version == version and "sha256" in hashes and hashes["sha256"] not in locked.hashes:
            raise SetupError(
                f"{item['download_info']['url']} is not the file of {name} {version} that the recipe was proven with: "
                f"its sha256 is {hashes['sha256']}. Is a mirror or a find-links folder in use that changes files? "
                "(`pip config list` shows them)"
            )

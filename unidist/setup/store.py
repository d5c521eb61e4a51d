"""Where environments live and which are ready. An environment is ready when its marker says so, and never before."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unidist.setup import recipes
from unidist.setup.recipes import Recipe

MARKER = "unidist-ready.json"
GROWING = "unidist-growing"  # there while a stage is being installed


def home() -> Path:
    """Outside of any checkout: $UNIDIST_HOME, else the user's cache directory."""
    if os.environ.get("UNIDIST_HOME"):
        return Path(os.environ["UNIDIST_HOME"]).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "unidist"


@dataclass(frozen=True)
class Environment:
    """One environment on disk, whether or not it is ready."""

    recipe: Recipe
    path: Path

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    def _marker(self) -> dict[str, Any]:
        """What the marker says; empty when there is none that makes sense, or its interpreter is gone."""
        try:
            marker = json.loads((self.path / MARKER).read_text())
            sound = isinstance(marker["python"], str) and all("versions" in one for one in marker["stages"].values())
            return marker if sound and os.access(self.python, os.X_OK) else {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return {}

    def ready(self) -> dict[str, dict[str, Any]]:
        """Stage -> what is known about it, for the stages that were built and proven."""
        stages: dict[str, dict[str, Any]] = self._marker().get("stages", {})
        return stages

    @property
    def made_with(self) -> str:
        """The interpreter that a ready environment was made with."""
        return str(self._marker()["python"])

    @property
    def added(self) -> list[str]:
        """Requirements that the user added to what the recipe installs."""
        return list(self._marker().get("added", []))

    @property
    def brought(self) -> list[str]:
        """The packages that came with those, by name. They may change; what the recipe installed may not."""
        return list(self._marker().get("brought", []))

    def has(self, module: str) -> bool:
        """Whether a module is where it was installed. Nothing is imported."""
        return any((self.path / "lib").glob(f"python3*/site-packages/{module}/__init__.py"))

    @property
    def made(self) -> float:
        try:
            return (self.path / MARKER).stat().st_mtime
        except OSError:  # it has just been removed
            return 0.0

    @property
    def version(self) -> str:
        return self.path.name.rpartition("-python")[2].partition("-")[0]

    @property
    def interrupted(self) -> bool:
        """A stage was begun and not proven. What was ready before still is, but nothing more may be built on it."""
        return (self.path / GROWING).exists()

    def mark(
        self, python: str, stages: dict[str, dict[str, Any]], added: Sequence[str] = (), brought: Sequence[str] = ()
    ) -> None:
        """Say which stages are ready and which packages were added, all at once."""
        aside = self.path / f"{MARKER}.{os.getpid()}"
        marker = {"python": python, "stages": stages, "added": list(added), "brought": list(brought)}
        aside.write_text(json.dumps(marker, indent=1))
        aside.replace(self.path / MARKER)

    def variables(self) -> dict[str, str]:
        """What a process needs in its environment beside the interpreter."""
        site = next((self.path / "lib").glob("python3*/site-packages"), None)
        paths = [str(site / part) for stage in self.recipe.stages for part in stage.library_path if site]
        if not paths:
            return {}
        return {"LD_LIBRARY_PATH": os.pathsep.join([*paths, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])}


def existing(recipe: Recipe, version: str | None = None) -> list[Environment]:
    """Environments of this recipe with anything ready in them, for this or whichever interpreter, the newest first."""
    found = [environment for environment in _all(recipe, version) if environment.ready()]
    return sorted(found, key=lambda environment: environment.made, reverse=True)


def named(recipe: Recipe) -> list[Environment]:
    """Ready environments of this name, also of older recipes, the newest first."""
    pattern = re.compile(rf"{re.escape(recipe.name)}-[0-9a-f]{{12}}-python[^-]+(-\d+)?")
    paths = [path for path in (home() / "environments").glob("*") if pattern.fullmatch(path.name)]
    found = [environment for path in paths if (environment := Environment(recipe, path)).ready()]
    return sorted(found, key=lambda environment: environment.made, reverse=True)


def new(recipe: Recipe, version: str) -> Environment:
    """Where the next one goes, beside any that is there and may be in use. What was never ready makes room."""
    taken = {environment.path.name for environment in existing(recipe, version)}
    for environment in _all(recipe, version):
        if environment.path.name not in taken:
            remove(environment.path)
    base = f"{recipe.name}-{recipe.key}-python{version}"
    names = (base if number == 1 else f"{base}-{number}" for number in range(1, len(taken) + 2))
    return Environment(recipe, home() / "environments" / next(name for name in names if name not in taken))


def _all(recipe: Recipe, version: str | None) -> Iterator[Environment]:
    python = re.escape(version) if version else "[^-]+"
    wanted = re.compile(rf"{re.escape(recipe.name)}-{recipe.key}-python{python}(-\d+)?")
    for path in (home() / "environments").glob("*"):
        if wanted.fullmatch(path.name):
            yield Environment(recipe, path)


def find(recipe: Recipe, stage: str) -> Environment | None:
    """A ready environment that has `stage`."""
    return next((environment for environment in existing(recipe) if stage in environment.ready()), None)


def how_to_add(package: str) -> str:
    """The command that puts a package into the environment of the running interpreter."""
    here = Path(sys.prefix)
    try:
        stages = list(json.loads((here / MARKER).read_text())["stages"])
    except (OSError, ValueError, KeyError):
        return f"{sys.executable} -m pip install {package}"
    backend = os.environ.get("UNIDIST_BACKEND")
    return f"unidist setup {backend if backend in stages else stages[0]} --with {package}"


def outdated() -> list[Path]:
    """Environments of recipes that this unidist does not have (any more), or that a newer one has replaced, unless they
    are in use; and links into checkouts that are gone."""
    known = recipes.recipes()
    current = tuple(f"{recipe.name}-{recipe.key}" for recipe in known)
    places = [path for path in (home() / "environments").glob("*/") if not path.name.startswith(current)]
    for recipe in known:
        newest: set[str] = set()
        for environment in existing(recipe):
            if environment.version in newest:
                places.append(environment.path)
            newest.add(environment.version)
    overlays = (home() / "overlays").glob("*")
    dangling = [path for path in overlays if not all(link.exists() for link in path.iterdir())]
    return [path for path in places if not in_use(path)] + dangling


def in_use(path: Path) -> bool:
    """Whether a process has anything of this environment loaded, or is building it."""
    mark = f"{path}/".encode()
    for process in Path("/proc").glob("[0-9]*"):
        for file in ("maps", "cmdline"):
            with contextlib.suppress(OSError):
                if mark in (process / file).read_bytes():
                    return True
    return False


def remove(path: Path) -> None:
    """An environment's marker goes first, so that it is never half there and ready."""
    (path / MARKER).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)

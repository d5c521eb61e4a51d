"""Where environments live and which are ready. An environment is ready when its marker says so, and never before."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unidist.setup.recipes import Recipe

MARKER = "unidist-ready.json"


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

    def marker(self) -> dict[str, Any]:
        """What the marker says; empty when there is none, or its interpreter is gone."""
        try:
            marker: dict[str, Any] = json.loads((self.path / MARKER).read_text())
            return marker if os.access(self.python, os.X_OK) else {}
        except (OSError, ValueError):
            return {}

    def ready(self) -> dict[str, dict[str, Any]]:
        """Stage -> what is known about it, for the stages that were built and proven by today's recipe."""
        keys = {stage.name: stage.key for stage in self.recipe.stages}
        stages = self.marker().get("stages", {})
        return {name: facts for name, facts in stages.items() if facts["key"] == keys.get(name)}

    def mark(self, python: str, stages: dict[str, dict[str, Any]]) -> None:
        """Say which stages are ready, all at once."""
        aside = self.path / f"{MARKER}.{os.getpid()}"
        aside.write_text(json.dumps({"python": python, "stages": stages}, indent=1))
        aside.replace(self.path / MARKER)

    def variables(self) -> dict[str, str]:
        """What a process needs in its environment beside the interpreter."""
        site = next((self.path / "lib").glob("python3*/site-packages"), None)
        paths = [str(site / part) for stage in self.recipe.stages for part in stage.library_path if site]
        if not paths:
            return {}
        return {"LD_LIBRARY_PATH": os.pathsep.join([*paths, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])}


def location(recipe: Recipe, version: str) -> Environment:
    return Environment(recipe, home() / "environments" / f"{recipe.name}-{recipe.key}-python{version}")


def existing(recipe: Recipe) -> Iterator[Environment]:
    """Ready environments of this recipe, for whichever interpreter, the newest first."""
    markers = (home() / "environments").glob(f"{recipe.name}-{recipe.key}-*/{MARKER}")
    for marker in sorted(markers, key=lambda path: path.stat().st_mtime, reverse=True):
        yield Environment(recipe, marker.parent)


def find(recipe: Recipe, stage: str) -> Environment | None:
    """A ready environment that has `stage`."""
    return next((each for each in existing(recipe) if stage in each.ready()), None)

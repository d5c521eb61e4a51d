"""What goes into each environment: versions that were seen to work together, and how they are proven to.

Each plug-in brings the recipe of its own; here is what a recipe is made of, and the one for development.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from unidist import registry
from unidist.errors import SetupError


@dataclass(frozen=True)
class SourceBuild:
    """A package that must be built from its source distribution, with changes, when all else is there. The wheel is
    cached."""

    requirement: str
    tools: tuple[str, ...]  # for the build, beside the environment and not in it
    env: Mapping[str, str]
    replace: tuple[tuple[str, str, str], ...]  # file, text, new text


@dataclass(frozen=True)
class Stage:
    """One framework within an environment. A stage never changes a package that an earlier one installed."""

    name: str  # that of the backend
    packages: tuple[str, ...]
    probe: str  # the path of a script that ends well only after a collective over two processes; run by `python -I`
    after: tuple[str, ...] = ()  # stages that must be there first
    # Smaller builds of the packages, tried first where there is no GPU; and what to say where pip finds none.
    without_gpu: tuple[str, ...] = ()
    otherwise: str = ""
    build: SourceBuild | None = None
    library_path: tuple[str, ...] = ()  # below site-packages, for LD_LIBRARY_PATH

    @property
    def key(self) -> str:
        """Changes whenever what is installed does."""
        return _hash(self.packages, self.without_gpu, self.after, self.build)


@dataclass(frozen=True)
class Recipe:
    name: str
    python: tuple[str, ...]  # in order of preference
    stages: tuple[Stage, ...]
    every: tuple[str, ...] = ()  # packages that come before any stage
    locks: str = ""  # the folder of its locks, see `setup.locks`; without one, pip decides what is not pinned here

    @property
    def key(self) -> str:
        """Changes with anything that is installed: environments of two recipes never share a place."""
        return _hash(self.name, self.every, [(stage.name, stage.key) for stage in self.stages])

    def stage(self, name: str) -> Stage:
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise SetupError(f"the environment {self.name!r} needs {name}, which none of the backends that are here brings")


def _hash(*what: object) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()[:12]


# What unidist itself uses in an environment; cloudpickle ships functions of a notebook to `launch`.
NEEDED = ("cloudpickle>=3", "safetensors")
_LOCKS = str(Path(__file__).with_name("locks"))

DEV = Recipe(
    name="dev",
    python=("3.11", "3.12", "3.10", "3.13"),
    locks=_LOCKS,
    stages=(
        Stage(
            "dev",
            (
                "numpy",
                "pytest>=8",
                "pytest-xdist",
                "hypothesis",
                "ruff",
                "mypy",
                "build",
                "cloudpickle>=3",
                "safetensors",
                "tensorboard",
                "uv",
            ),
            probe=str(Path(__file__).with_name("probe_dev.py")),
        ),
    ),
)

# Apart from DEV, so that a new version here does not build the environment of the tests anew. numpy and safetensors are
# what the pages of the API reference are imported with.
DOCS = Recipe(
    name="docs",
    python=("3.11", "3.12", "3.10", "3.13"),
    locks=_LOCKS,
    stages=(
        Stage(
            "docs",
            ("mkdocs>=1.6,<2", "mkdocs-material>=9.5,<10", "numpy", "safetensors"),
            probe=str(Path(__file__).with_name("probe_docs.py")),
        ),
    ),
)


def recipes() -> list[Recipe]:
    """Those of all plug-ins, then ours. Plug-ins that name the same recipe share an environment. One that does not fit
    those before it is left out, so that it does no harm to them; `check` says why."""
    return [*_of_plugins(strict=None).values(), DEV, DOCS]


def _of_plugins(strict: str | None) -> dict[str, Recipe]:
    """`strict` is the plug-in whose recipe has to fit."""
    found: dict[str, Recipe] = {}
    for plugin in registry.loadable():
        if plugin.recipe is not None:
            try:
                found[plugin.recipe.name] = _together(found.get(plugin.recipe.name), plugin.recipe)
            except SetupError:
                if plugin.name == strict:
                    raise
    return found


def _together(one: Recipe | None, other: Recipe) -> Recipe:
    one = one or replace(other, stages=())
    here = [stage.name for stage in one.stages]
    if (one.python, one.every, one.locks) != (other.python, other.every, other.locks):
        raise SetupError(
            f"another plug-in ({', '.join(here)}) has an environment called {one.name!r} too, with other interpreters, "
            f"packages in common or locks: {one.python}, {one.every}, {one.locks or 'no locks'} and {other.python}, "
            f"{other.every}, {other.locks or 'no locks'}. Give one of their recipes another name."
        )
    stages = {stage.name: stage for stage in (*one.stages, *other.stages)}
    if len(stages) < len(one.stages) + len(other.stages):
        raise SetupError(f"the environment {one.name!r} has two stages of one name: {', '.join(stages)}")
    try:
        order = list(TopologicalSorter({name: stage.after for name, stage in stages.items()}).static_order())
    except CycleError as error:
        raise SetupError(f"the stages of the environment {one.name!r} come after each other: {error.args[1]}") from None
    return replace(one, stages=tuple(stages[name] for name in order if name in stages))


def names() -> list[str]:
    return [stage.name for recipe in recipes() for stage in recipe.stages]


def check(plugin: str) -> None:
    """Raise where the recipe of this plug-in cannot be used."""
    _of_plugins(strict=plugin)


def recipe_of(stage: str) -> Recipe | None:
    return next((recipe for recipe in recipes() if stage in [known.name for known in recipe.stages]), None)

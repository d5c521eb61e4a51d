"""Packages that a user adds to an environment: `unidist setup torch --with transformers`.

They are kept in the environment's marker, so that a rebuilt environment gets them again. pip is told the version of
everything that the recipe installed as a constraint: what was proven to work stays as it is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from unidist.errors import SetupError, UsageError
from unidist.setup import store
from unidist.setup.locks import normal
from unidist.setup.recipes import Recipe
from unidist.setup.steps import StepFailed, Steps, constraints, pip, versions
from unidist.setup.store import Environment


def requirement(text: str) -> str:
    """What the user wrote, as it may be remembered: a folder or file is named in full."""
    if not text.strip() or text.startswith("-"):
        raise UsageError(f"--with {text}: name a package as for pip, such as transformers or 'transformers<5'")
    return os.path.abspath(text) if os.sep in text and os.path.exists(text) else text


def remembered(recipe: Recipe) -> list[str]:
    """What was added to environments of this name, the newest word on each package."""
    found: dict[str, str] = {}
    for environment in store.named(recipe):
        for package in environment.added:
            found.setdefault(_name(package), package)
    return list(found.values())


def add(environment: Environment, requirements: Sequence[str], steps: Steps) -> None:
    """Install them beside what is there, or raise with pip's reason; then the environment is as it was."""
    new = [requirement for requirement in requirements if requirement not in environment.added]
    if not new:
        return
    before, growing = versions(environment), environment.path / store.GROWING
    growing.touch()
    try:
        pinned = constraints(environment, but=environment.brought)
        steps.run(f"{environment.recipe.name}: {', '.join(new)}", pip(environment, "-c", pinned, *new))
    except StepFailed as error:
        if versions(environment) != before:  # it failed while it installed, which a full disk may cause
            raise
        growing.unlink()
        raise SetupError(
            f"{', '.join(new)} cannot be added to {environment.path}, which is as it was before. pip's reason:\n"
            f"{_reason(error.said)}\n  The whole log: {steps.path}"
        ) from None
    except BaseException:  # somebody has ended it, perhaps while pip was only downloading
        if versions(environment) == before:
            growing.unlink()
        raise
    names = {_name(requirement) for requirement in new}
    added = [package for package in environment.added if _name(package) not in names] + new
    brought = sorted({*environment.brought, *(versions(environment).keys() - before.keys())})
    environment.mark(environment.made_with, environment.ready(), added, brought)
    growing.unlink()


def add_again(environment: Environment, requirements: Sequence[str], steps: Steps) -> None:
    """What an earlier environment had. One that no longer fits is told and left out: the framework itself is ready."""
    for requirement in requirements:
        try:
            add(environment, [requirement], steps)
        except SetupError as error:
            steps.say(f"{requirement} was in the environment before and is left out now: {error}")


def _name(requirement: str) -> str:
    """The package that a requirement is about, as pip compares names."""
    return normal(re.split(r"[\s\[<>=!~;@]", requirement, maxsplit=1)[0])


def _reason(said: str) -> str:
    """The part of pip's output that says why, in words that fit what the user did."""
    _, conflict, rest = said.partition("The conflict is caused by:\n")
    lines = rest.splitlines() if conflict else [line for line in said.splitlines() if line.startswith("ERROR: ")]
    reasons = []
    for line in lines:
        if conflict and not line.startswith(" "):
            break
        line = line.strip().removeprefix("ERROR: ")
        line = line.replace("The user requested (constraint) ", "the environment needs exactly ")
        reasons.append(line.replace("The user requested ", "you asked for "))
    return "\n".join(f"    {line}" for line in reasons or said.splitlines()[-5:])

"""Writes the locks of the recipes anew: `python -m unidist.setup.lock`, or with the names of some recipes.

A tool for whoever changes a recipe. uv resolves for Pythons that are not on this machine, and knows the hash of every
file of a release, for every platform; pip can do neither. What uv is to look for beside the usual index is said by its
own variables (UV_FIND_LINKS, UV_EXTRA_INDEX_URL).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence

from unidist.setup import locks
from unidist.setup.recipes import Recipe, recipes


def requirements(recipe: Recipe) -> list[str]:
    """Everything that may come into an environment of this recipe, but what is built from source. The tools of that
    build stand for what the built package needs."""
    found = list(recipe.every)
    for stage in recipe.stages:
        found += stage.packages
        found += [tool for tool in stage.build.tools if re.fullmatch(r"[\w-]+", tool)] if stage.build else []
    return found


def resolve(recipe: Recipe, python: str) -> str:
    command = ["uv", "pip", "compile", "-", "--quiet", "--generate-hashes", "--no-annotate", "--no-header"]
    command += ["--python-version", python, "--python-platform", "x86_64-unknown-linux-gnu"]
    command += ["--index-strategy", "unsafe-best-match", "--no-emit-index-url"]
    text = "\n".join(requirements(recipe))
    return subprocess.run(command, input=text, text=True, stdout=subprocess.PIPE, check=True).stdout


def main(names: Sequence[str]) -> None:
    if shutil.which("uv") is None:
        sys.exit("uv is needed to write the locks: `pip install uv`")
    for recipe in recipes():
        for python in recipe.python if recipe.locks and (not names or recipe.name in names) else ():
            file = locks.file(recipe, python)
            file.write_text(resolve(recipe, python))
            print(f"{file}: {len(locks.read(recipe, python))} packages")


if __name__ == "__main__":
    main(sys.argv[1:])

"""What the tests of `unidist setup` share: recipes small enough for a test, in a cache of their own.

PYTEST_DONT_REWRITE: the tests import it before pytest takes its fixture.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from unidist.setup import build
from unidist.setup.recipes import Recipe, Stage

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
GOOD = "print('proven')"


class Lab:
    """A cache of its own and probes that tell how often they ran."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def probe(self, name: str, body: str = GOOD) -> str:
        file = self.path / f"{name}.py"
        count = f"open({str(self.path / f'{name}.runs')!r}, 'a').write(sys.executable + '\\n')"
        file.write_text(f"import os, sys, time\n{count}\n{textwrap.dedent(body)}\n")
        return str(file)

    def runs(self, name: str) -> int:
        file = self.path / f"{name}.runs"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def recipe(self, *stages: Stage) -> Recipe:
        return Recipe("tiny", (PYTHON,), stages)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.setenv("UNIDIST_HOME", str(tmp_path / "a home"))
    monkeypatch.setattr(build, "VENV", ("-m", "venv", "--without-pip"))  # which takes seconds
    return Lab(tmp_path)

"""Locks: what an environment gets, to the version and the file."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

from setup_support import PYTHON
from small_wheels import wheel
from unidist.errors import SetupError
from unidist.setup import build, locks, recipes, store
from unidist.setup.lock import requirements
from unidist.setup.recipes import Recipe, Stage


@pytest.mark.parametrize(
    ("recipe", "python"), [(r, p) for r in recipes.recipes() for p in r.python], ids=lambda x: getattr(x, "name", x)
)
def test_every_recipe_is_locked_for_every_python(recipe: Recipe, python: str) -> None:
    lock = locks.read(recipe, python)
    assert lock, f"run `python -m unidist.setup.lock {recipe.name}`"
    assert all(locked.hashes for locked in lock.values())
    for requirement in requirements(recipe):
        name, pinned, version = requirement.partition("==")
        locked = lock[locks.normal(re.split("[<>]", name)[0])]
        assert not pinned or locked.version == version, f"run `python -m unidist.setup.lock {recipe.name}`"


def report(folder: Path, version: str, digest: str) -> Path:
    file = folder / "report.json"
    taken = {"url": "https://somewhere/tiny.whl", "archive_info": {"hashes": {"sha256": digest}}}
    file.write_text(
        json.dumps({"install": [{"metadata": {"name": "Tiny", "version": version}, "download_info": taken}]})
    )
    return file


def test_a_file_that_is_not_the_locks_is_refused(tmp_path: Path) -> None:
    lock = {"tiny": locks.Locked("1.0", frozenset({"a" * 64}))}
    locks.check(report(tmp_path, "1.0", "a" * 64), lock)
    with pytest.raises(SetupError, match=r"https://somewhere/tiny\.whl is not the file of tiny 1\.0"):
        locks.check(report(tmp_path, "1.0", "b" * 64), lock)
    locks.check(report(tmp_path, "1.0+cpu", "b" * 64), lock)  # a build of another index, pinned by its version


def test_an_environment_gets_what_the_lock_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "locks").mkdir()
    monkeypatch.setenv("UNIDIST_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    known = wheel(tmp_path, "tiny", "1.0")
    wheel(tmp_path, "tiny", "2.0")
    probe = tmp_path / "probe.py"
    probe.write_text("import tiny; assert tiny.version == '1.0', tiny.version")
    recipe = Recipe("small", (PYTHON,), (Stage("one", ("tiny",), str(probe)),), locks=str(tmp_path / "locks"))

    locks.file(recipe, PYTHON).write_text(f"tiny==1.0 \\\n    --hash=sha256:{'0' * 64}\n")
    with pytest.raises(SetupError, match="is not the file of tiny"):
        build.ensure(recipe, ["one"])
    assert store.find(recipe, "one") is None

    digest = hashlib.sha256(known.read_bytes()).hexdigest()
    locks.file(recipe, PYTHON).write_text(
        f"tiny==1.0 \\\n    --hash=sha256:{'0' * 64} \\\n    --hash=sha256:{digest}\n"
    )
    environment = build.ensure(recipe, ["one"])
    assert environment.ready()["one"]["versions"]["tiny"] == "1.0"

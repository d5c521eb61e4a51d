"""The command line itself: help that teaches, errors that help, and the list of backends."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launch_support import PATIENCE, ROOT, Place
from unidist import __version__
from unidist.cli import COMMANDS


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_help_lists_every_command_and_teaches(place: Place) -> None:
    ended = place.run()
    assert ended.code == 0
    for name in COMMANDS:
        assert f"\n  {name}" in ended.out
        shown = place.run(name, "--help")
        assert shown.code == 0
        assert shown.out.startswith(f"usage: unidist {name}")
    assert "unidist run --backend torch --nproc 2 train.py" in ended.out


def test_version(place: Place) -> None:
    assert place.run("--version").out == f"unidist {__version__}\n"


def test_a_misspelt_command(place: Place) -> None:
    ended = place.run("setpu", "torch")
    assert ended.code == 2
    assert "Did you mean 'setup'?" in ended.err


def test_backends_says_what_is_there_and_what_is_missing(place: Place) -> None:
    ended = place.run("backends")
    assert ended.code == 0, ended.err
    table = ended.out.partition("\n\n")[0]
    rows = {line.split()[0]: line for line in table.splitlines()}
    assert "this interpreter" in rows["plain"]
    assert "no module no_such_framework" in rows["absent"]
    assert "torch" in rows
    assert "it is only a test" in ended.out  # why "roles" has no GPU


def test_backends_says_what_options_change(place: Place) -> None:
    mirrored, consistent = (
        place.run("backends", "oneflow", "--option", f"view={v}") for v in ("mirrored", "consistent")
    )
    assert "use view='consistent'" in mirrored.out
    assert "use view='consistent'" not in consistent.out
    assert "use view='mirrored'" in consistent.out
    assert "torch" not in consistent.out.partition("\n\n")[0]
    refused = place.run("backends", "--option", "view=mirrored")
    assert refused.code == 2
    assert "name the backend" in refused.err


def test_the_markdown_table_has_every_backend(place: Place) -> None:
    header, rule, *rows = place.run("backends", "--markdown").out.splitlines()
    names = [cell.strip() for cell in header.strip("|").split("|")][1:]
    assert {"torch", "plain", "roles", "absent"} <= set(names)
    assert set(rule) <= set("|- ")
    assert [row for row in rows if row.startswith("| clip norm |") and row.count("|") == len(names) + 2]


def test_from_a_bare_clone_in_a_path_with_spaces(tmp_path: Path) -> None:
    """No metadata, no PYTHONPATH, another directory, an interpreter that may have nothing installed."""
    clone = tmp_path / "a clone"
    clone.mkdir()
    for name in ("unidist", "backends", "pyproject.toml"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, clone / name)
    for path in clone.rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    script = tmp_path / "my script.py"
    script.write_text("import unidist_torch, unidist, os; print('rank', os.environ['RANK'], unidist.__file__)")
    place = Place(tmp_path / "place")
    env = {**place.env, "PYTHONPATH": str(place.path / "plugins"), "UNIDIST_HOME": str(tmp_path / "a home")}
    command = [sys.executable, "-m", "unidist", "run", "--backend", "plain", "-n", "2", str(script)]
    ended = subprocess.run(command, cwd=clone, env=env, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("rank ") == 2
    assert str(tmp_path / "a home") in ended.stdout


def test_only_what_is_missing_is_called_required(place: Place) -> None:
    assert place.run("python").err.endswith("required: NAME\n")

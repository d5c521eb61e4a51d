"""Which interpreter an environment is made with: the one that is found, named, or fetched by uv."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
import uv

import python_archive
from setup_support import PYTHON, Lab
from unidist.cli import setup
from unidist.errors import SetupError
from unidist.setup import build, pythons
from unidist.setup.recipes import Recipe, Stage

pytest_plugins = ["setup_support"]


def fake_python(path: Path, version: str, works: bool = True) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{f'echo {version} $0' if works else 'echo pyenv: command not found >&2; exit 127'}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No interpreter anywhere but in what a test puts below."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for name in ("PYENV_ROOT", "CONDA_PREFIX", "UV_PYTHON_INSTALL_DIR", "XDG_DATA_HOME", "XDG_BIN_HOME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_a_shim_that_does_not_run_is_passed_over(nowhere: Path) -> None:
    fake_python(nowhere / "bin/python3.99", "", works=False)
    real = fake_python(nowhere / ".pyenv/versions/3.99.4/bin/python3.99", "3.99.4")
    assert pythons.find(("3.99",)) == (real, "3.99.4")


def test_path_comes_before_pyenv_and_the_preferred_version_before_both(nowhere: Path) -> None:
    fake_python(nowhere / ".pyenv/versions/3.99.4/bin/python3.99", "3.99.4")
    on_path = fake_python(nowhere / "bin/python3.99", "3.99.1")
    assert pythons.find(("3.99", "3.98")) == (on_path, "3.99.1")
    fake_python(nowhere / "bin/python3.98", "3.98.1")
    assert pythons.find(("3.98", "3.99"))[1] == "3.98.1"


def test_the_running_one_is_taken_when_it_fits_and_none_is_preferred(nowhere: Path) -> None:
    fake_python(nowhere / f"bin/python{PYTHON}", f"{PYTHON}.0")
    found, version = pythons.find(("3.99", PYTHON))
    assert os.path.samefile(found, sys.executable)
    assert version == ".".join(map(str, sys.version_info[:3]))
    preferred = fake_python(nowhere / "bin/python3.99", "3.99.1")
    assert pythons.find(("3.99", PYTHON)) == (preferred, "3.99.1")


def test_a_missing_interpreter_is_told_before_anything_is_built(nowhere: Path, lab: Lab) -> None:
    later = Recipe("later", ("3.99",), (Stage("two", (), lab.probe("two")),))
    asked = [(lab.recipe(Stage("one", (), lab.probe("one"))), ["one"]), (later, ["two"])]
    with pytest.raises(SetupError, match=r"two: Python 3\.99 is needed.*nothing was built; `unidist setup one` can be"):
        setup.refuse_what_has_no_python(asked, None)


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return python_archive.pack(tmp_path_factory.mktemp("mirror"))


@pytest.fixture
def fetchable(nowhere: Path, lab: Lab, archive: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """Its Python is missing, but the real uv is there and can have it from a mirror on the disk."""
    for name in [name for name in os.environ if name.startswith("UV_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("UV_NO_CONFIG", "1")
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(nowhere / "cache"))
    monkeypatch.setenv("UV_PYTHON_DOWNLOADS_JSON_URL", python_archive.offer(archive, nowhere))
    (nowhere / "bin").mkdir()
    (nowhere / "bin/uv").symlink_to(uv.find_uv_bin())
    # The archive has the Python that runs this test, which would be found as such.
    monkeypatch.setattr(pythons, "current", lambda: "another")
    return Recipe("later", (PYTHON,), (Stage("two", (), lab.probe("two")),))


@pytest.mark.parametrize("place", [".local/share/uv/python", "elsewhere"])
def test_a_missing_python_is_fetched_by_uv_only_when_asked(
    place: str,
    nowhere: Path,
    lab: Lab,
    fetchable: Recipe,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    installed = nowhere / place
    if place == "elsewhere":  # the other one is uv's default
        monkeypatch.setenv("UV_PYTHON_INSTALL_DIR", str(installed))
    asked = [(fetchable, ["two"])]
    with pytest.raises(SetupError, match=rf"add --yes: `uv python install {re.escape(PYTHON)}`.*nothing was built"):
        setup.refuse_what_has_no_python(asked, None)
    assert not installed.exists()
    assert capfd.readouterr().err == ""

    setup.refuse_what_has_no_python(asked, None, may_fetch=True)
    said = capfd.readouterr().err
    assert said.startswith(f"Python {PYTHON} is missing and is fetched now: uv python install {PYTHON}\n")
    assert f"Installed Python {platform.python_version()}" in said
    python, version = pythons.find((PYTHON,))
    assert Path(python).is_relative_to(installed)
    assert version == platform.python_version()

    setup.refuse_what_has_no_python(asked, None, may_fetch=True)
    assert capfd.readouterr().err == ""  # not again
    environment = build.ensure(fetchable, ["two"])
    assert environment.made_with == python
    assert lab.runs("two") == 1
    where = [str(environment.python), "-I", "-c", "import venv; print(venv.__file__)"]
    assert Path(subprocess.check_output(where, text=True)).is_relative_to(installed)


def test_a_fetch_that_fails(
    nowhere: Path, fetchable: Recipe, archive: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UV_PYTHON_DOWNLOADS_JSON_URL", python_archive.offer(archive, nowhere, sha256="0" * 64))
    failed = rf"`uv python install {re.escape(PYTHON)}` failed \(exit code 1\); what it says is above"
    with pytest.raises(SetupError, match=rf"{failed} \(nothing was built\)"):
        setup.refuse_what_has_no_python([(fetchable, ["two"])], None, may_fetch=True)
    assert "Hash mismatch" in capfd.readouterr().err


def test_a_missing_python_without_uv(nowhere: Path, lab: Lab) -> None:
    asked = [(Recipe("later", ("3.99",), (Stage("two", (), lab.probe("two")),)), ["two"])]
    with pytest.raises(SetupError, match=r"Install one \(`pyenv install 3\.99`.*nothing was built"):
        setup.refuse_what_has_no_python(asked, None, may_fetch=True)


def test_none_found_says_what_to_install(nowhere: Path) -> None:
    with pytest.raises(SetupError, match=r"pyenv install 3\.99.*--python PATH"):
        pythons.find(("3.99",))


def test_a_named_one_is_checked(nowhere: Path) -> None:
    wrong = fake_python(nowhere / "some/python", "3.7.1")
    with pytest.raises(SetupError, match=r"is Python 3\.7\.1; this needs Python 3\.99"):
        pythons.find(("3.99",), wrong)
    real = fake_python(nowhere / ".pyenv/versions/3.98.4/bin/python3.98", "3.98.4")
    assert pythons.find(("3.99", "3.98"), "3.98") == (real, "3.98.4")
    with pytest.raises(SetupError, match=r"--python 3\.97: this needs Python 3\.99"):
        pythons.find(("3.99",), "3.97")
    with pytest.raises(SetupError, match=r"--python 2\.7: this needs Python 3\.99 or 3\.98"):
        pythons.find(("3.99", "3.98"), "2.7")
    with pytest.raises(SetupError, match=r"does not run.*this needs Python 3\.99"):
        pythons.find(("3.99",), str(nowhere / "nothing"))

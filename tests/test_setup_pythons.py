"""Which interpreter an environment is made with: the one that is found, named, or fetched by uv."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from setup_support import PYTHON, Lab
from unidist.cli import setup
from unidist.errors import SetupError
from unidist.setup import pythons
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
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/bin:/usr/bin")
    for name in ("PYENV_ROOT", "CONDA_PREFIX", "UV_PYTHON_INSTALL_DIR"):
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


def fake_uv(folder: Path, python: str) -> Path:
    """What `uv python install 3.99` does, with a mirror that needs no network. It writes down how it was called."""
    fake_python(folder / "mirror/python3.99", python)
    target = folder / ".local/share/uv/python/cpython-3.99/bin"
    uv = folder / "bin/uv"
    uv.parent.mkdir(exist_ok=True)
    uv.write_text(
        f'#!/bin/sh\necho "$@" >> "{folder}/calls"\nmkdir -p {target}\ncp {folder}/mirror/python3.99 {target}\n'
    )
    uv.chmod(0o755)
    return folder / "calls"


def test_a_missing_python_is_fetched_by_uv_only_when_asked(
    nowhere: Path, lab: Lab, capfd: pytest.CaptureFixture[str]
) -> None:
    calls = fake_uv(nowhere, "3.99.2")
    asked = [(Recipe("later", ("3.99",), (Stage("two", (), lab.probe("two")),)), ["two"])]
    with pytest.raises(SetupError, match=r"add --yes: `uv python install 3\.99`.*nothing was built"):
        setup.refuse_what_has_no_python(asked, None)
    assert not calls.exists()
    setup.refuse_what_has_no_python(asked, None, may_fetch=True)
    assert calls.read_text() == "python install 3.99\n"
    assert "Python 3.99 is missing and is fetched now: uv python install 3.99" in capfd.readouterr().err
    assert pythons.find(("3.99",))[1] == "3.99.2"
    setup.refuse_what_has_no_python(asked, None, may_fetch=True)
    assert calls.read_text() == "python install 3.99\n"  # not again


def test_a_fetch_that_fails_and_a_machine_without_uv(nowhere: Path, lab: Lab) -> None:
    asked = [(Recipe("later", ("3.99",), (Stage("two", (), lab.probe("two")),)), ["two"])]
    with pytest.raises(SetupError, match=r"Install one \(`pyenv install 3\.99`.*nothing was built"):
        setup.refuse_what_has_no_python(asked, None, may_fetch=True)
    uv = nowhere / "bin/uv"
    uv.parent.mkdir(exist_ok=True)
    uv.write_text("#!/bin/sh\nexit 3\n")
    uv.chmod(0o755)
    with pytest.raises(SetupError, match=r"`uv python install 3\.99` failed \(exit code 3\)"):
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

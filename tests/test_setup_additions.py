"""Packages that users add to an environment, and using one by hand. pip is real, the packages are small and local."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch_support import PATIENCE, ROOT
from setup_support import PYTHON
from small_wheels import wheel
from unidist.errors import SetupError, UsageError
from unidist.setup import additions, build, store
from unidist.setup.recipes import Recipe, Stage
from unidist.setup.store import Environment


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    for version in ("1.0", "2.0"):
        wheel(shelf, "tiny", version)
        wheel(shelf, "friend", version, "helper")
        wheel(shelf, "helper", version)
    wheel(shelf, "modern", "1.0", "tiny>=2")
    monkeypatch.setenv("UNIDIST_HOME", str(tmp_path / "a home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    probe = tmp_path / "probe.py"
    probe.write_text("import tiny; assert tiny.version == '1.0'")
    return Recipe("small", (PYTHON,), (Stage("torch", ("tiny==1.0",), str(probe)),))


def version_of(environment: Environment, module: str) -> str:
    code = f"import {module}; print({module}.version)"
    command = [str(environment.python), "-I", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True).stdout.strip()


def test_added_remembered_and_never_at_the_cost_of_the_recipe(recipe: Recipe) -> None:
    environment = build.ensure(recipe, ["torch"], extra=["friend<2"])
    assert (version_of(environment, "friend"), version_of(environment, "tiny")) == ("1.0", "1.0")
    logs = len(list((store.home() / "logs").iterdir()))
    assert build.ensure(recipe, ["torch"], extra=["friend<2"]) == environment
    assert len(list((store.home() / "logs").iterdir())) == logs  # nothing was run for it again

    for refused, reason in (("modern", "modern 1.0 depends on tiny>=2"), ("tiny==2.0", "you asked for tiny==2.0")):
        with pytest.raises(SetupError, match="which is as it was before") as caught:
            build.ensure(recipe, ["torch"], extra=[refused])
        assert reason in str(caught.value)
        assert "the environment needs exactly tiny==1.0" in str(caught.value)
        assert version_of(environment, "tiny") == "1.0"
    with pytest.raises(SetupError, match="No matching distribution found for missing"):
        build.ensure(recipe, ["torch"], extra=["missing"])
    assert (environment.added, environment.interrupted) == (["friend<2"], False)

    build.ensure(recipe, ["torch"], extra=["friend"])  # what was added may change, unlike the recipe's
    assert environment.added == ["friend"]

    after = build.ensure(recipe, ["torch"], force=True)
    assert after.path != environment.path
    assert (after.added, version_of(after, "friend"), version_of(after, "tiny")) == (["friend"], "2.0", "1.0")


def test_a_new_recipe_keeps_what_was_added_where_it_fits(recipe: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    build.ensure(recipe, ["torch"], extra=["friend<2", "helper<2"])
    (stage,) = recipe.stages
    probe = Path(stage.probe).with_name("newer.py")
    probe.write_text("import helper; assert helper.version == '2.0'")
    newer = Recipe("small", (PYTHON,), (Stage("torch", ("helper==2.0",), str(probe)),))
    environment = build.ensure(newer, ["torch"])
    assert environment.added == ["friend<2"]
    assert "helper<2 was in the environment before and is left out now" in capsys.readouterr().err


def test_what_is_no_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="name a package as for pip"):
        additions.requirement("--upgrade")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert additions.requirement("./mine") == str(tmp_path / "mine")
    assert additions.requirement("transformers<5") == "transformers<5"


# -- by hand -------------------------------------------------------------------------------------------------------


def unidist(*arguments: str, text: str | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "unidist", *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    feed = {"stdin": subprocess.DEVNULL} if text is None else {"input": text}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE, **feed)


CODE = "import os, sys, unidist; print(sys.prefix, os.path.realpath(unidist.__file__), *sys.argv[1:])"


def test_python_and_shell_are_those_of_the_environment(tmp_path: Path) -> None:
    prefix = store.find(*_torch()).path
    script = tmp_path / "script.py"
    script.write_text(CODE)
    expected = f"{prefix} {ROOT / 'unidist' / '__init__.py'}"
    assert unidist("python", "torch", str(script), "-x", "--help").stdout.strip() == f"{expected} -x --help"
    assert unidist("python", "torch", "-c", CODE).stdout.strip() == expected
    assert "torch" in unidist("python", "torch", "-m", "pip", "list").stdout
    assert unidist("python", "torch", "-c", "import sys; sys.exit(7)").returncode == 7
    said = unidist("shell", "torch", text=f"python {script} 'a b'\nexit 5\n", SHELL="/bin/sh")
    assert (said.stdout.strip(), said.returncode) == (f"{expected} a b", 5)


def test_a_shell_whose_start_up_file_changes_path(tmp_path: Path) -> None:
    (tmp_path / ".bashrc").write_text("PATH=/usr/bin:/bin:$PATH\nshopt -s expand_aliases\n")
    home = str(store.home())
    leader, follower = os.openpty()
    command = [sys.executable, "-m", "unidist", "shell", "torch"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "UNIDIST_HOME": home, "SHELL": "/bin/bash"}
    process = subprocess.Popen(
        command, env=env, stdin=follower, stdout=follower, stderr=follower, start_new_session=True
    )
    os.close(follower)
    os.write(leader, b"echo found=$(command -v python); exit 3\n")
    said = b""
    try:
        while data := os.read(leader, 4096):
            said += data
    except OSError:  # the other end is closed
        pass
    assert process.wait(PATIENCE) == 3, said
    assert f"found={store.find(*_torch()).python}" in said.decode(), said


def _torch():
    from unidist.setup import recipes

    return recipes.recipe_of("torch"), "torch"


def test_an_environment_that_is_not_there(tmp_path: Path) -> None:
    missing = unidist("python", "torch", "-V", UNIDIST_HOME=str(tmp_path))
    assert (missing.returncode, "setup torch` once" in missing.stderr) == (1, True)
    misspelt = unidist("shell", "troch")
    assert (misspelt.returncode, "Did you mean 'torch'?" in misspelt.stderr) == (2, True)

"""The same project from a wheel, from an editable install, and from a bare clone."""

import os
import subprocess
import sys
import venv
import zipfile

import pytest

from project import ROOT


def call(*command, cwd=None, **env):
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env={**plain, **env}, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "a checkout with spaces"
    tracked = call("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\0")
    for name in filter(None, tracked):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    call(sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(source))
    return next(folder.glob("*.whl")), source


def environment(folder):
    venv.create(folder, with_pip=True)
    return str(folder / "bin" / "python"), str(folder / "bin" / "unidist")


def test_the_wheel_holds_core_and_backends(wheel):
    names = zipfile.ZipFile(wheel[0]).namelist()
    for name in ("unidist/py.typed", "unidist/testing/checks/training.py", "unidist_torch/backend.py"):
        assert name in names
    assert not [name for name in names if name.startswith(("tests/", "examples/", "backends/"))]
    assert wheel[0].name.startswith("unidist_train-")


def test_from_a_wheel(wheel, tmp_path):
    python, unidist = environment(tmp_path / "env")
    call(python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel[0]))
    assert "torch" in call(unidist, "backends", cwd=tmp_path)
    assert call(unidist, "--version", cwd=tmp_path).startswith("unidist ")


def test_from_an_editable_install(wheel, tmp_path):
    python, unidist = environment(tmp_path / "env")
    call(python, "-m", "pip", "install", "--quiet", "--no-deps", "--editable", str(wheel[1]))
    assert "torch" in call(unidist, "backends", cwd=tmp_path)


def test_from_a_bare_clone(wheel, tmp_path):
    """An interpreter that has nothing at all, not even numpy."""
    python, _ = environment(tmp_path / "env")
    for arguments in (["--help"], ["run", "--help"], ["setup", "--list"], ["backends"]):
        assert call(python, "-m", "unidist", *arguments, cwd=wheel[1])
    plan = call(
        python, "-m", "unidist", "run", "--dry-run", "--nproc=2", "-b", "torch", "examples/train.py", cwd=wheel[1]
    )
    assert "worker" in plan

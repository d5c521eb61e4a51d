"""`unidist new` writes scripts that train as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launch_support import ROOT
from unidist.cli.new import starters

TIMEOUT = 300


def unidist(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "unidist", *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=TIMEOUT, stdin=subprocess.DEVNULL
    )


def test_every_framework_has_one() -> None:
    assert sorted(starters()) == ["mxnet", "oneflow", "torch"]


@pytest.mark.parametrize("framework", ["torch", "mxnet", "oneflow"])
def test_a_starter_learns_on_two_processes(tmp_path: Path, framework: str) -> None:
    written = unidist(tmp_path, "new", "--framework", framework, "mine.py")
    assert written.returncode == 0, written.stderr
    assert f"run --backend {framework} --nproc 2 mine.py" in written.stdout
    assert f"unidist run --backend {framework} --nproc 2 mine.py" in (tmp_path / "mine.py").read_text()
    ended = unidist(tmp_path, "run", "--backend", framework, "--nproc", "2", "mine.py")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    accuracy = [float(text) for text in re.findall(r"epoch \d+  loss \S+  accuracy (\S+)", ended.stdout)]
    assert len(accuracy) == 5, ended.stdout  # rank 0 alone prints
    assert accuracy[-1] > 0.95  # half of it is chance
    assert (tmp_path / "checkpoints").is_dir()


def test_the_command_that_is_shown_can_be_copied(tmp_path: Path) -> None:
    written = unidist(tmp_path, "new", "--framework", "torch", "my train.py")
    assert written.stdout.rstrip().endswith("run --backend torch --nproc 2 'my train.py'"), written.stderr
    assert "unidist run --backend torch --nproc 2 'my train.py'" in (tmp_path / "my train.py").read_text()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("mine")
    refused = unidist(tmp_path, "new", "train.py")
    assert (refused.returncode, "exists already" in refused.stderr) == (2, True)
    assert (tmp_path / "train.py").read_text() == "mine"


def test_a_framework_without_one_and_a_folder_that_is_not_there(tmp_path: Path) -> None:
    unknown = unidist(tmp_path, "new", "--framework", "horovod", "train.py")
    assert "The starter of mxnet or torch runs on it" in unknown.stderr
    assert "`--backend horovod --option framework=torch`" in unknown.stderr
    assert "There are starters for mxnet, oneflow, torch." in unidist(tmp_path, "new", "-f", "jax", "train.py").stderr
    assert "No such file" in unidist(tmp_path, "new", "a/b.py").stderr
    assert list(tmp_path.iterdir()) == []

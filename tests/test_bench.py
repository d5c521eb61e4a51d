"""`unidist bench launch` on every engine. What it measures is for people to read, not for tests."""

from __future__ import annotations

import subprocess
import sys

import pytest

from launch_support import Place
from project import ROOT

WAYS = {
    "torch": ("by hand", "torchrun"),
    "mxnet": ("by hand",),
    "oneflow": ("by hand", "its launcher"),
    "horovod": ("horovodrun",),
}


@pytest.mark.parametrize("backend", WAYS)
def test_every_engine_has_its_way_to_the_first_collective(backend: str) -> None:
    command = [sys.executable, "-m", "unidist", "bench", "launch", "--backend", backend, "--rounds", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    rows = done.stdout.splitlines()[2:]
    assert {row[:12].strip() for row in rows} == {"unidist run", *WAYS[backend]}
    assert f"{2 * len(rows)}/{2 * len(rows)}" in done.stderr  # the progress of it


def test_a_backend_without_such_a_way_says_so(place: Place) -> None:
    ended = place.run("bench", "launch", "--backend", "plain")
    assert ended.code == 2
    assert "'plain' brings no way of its own to start a job" in ended.err
    assert "Traceback" not in ended.err
    assert "hand-written loops" in place.run("bench", "step", "--backend", "plain").err


def test_a_contestant_that_fails_is_named_with_what_it_said(place: Place) -> None:
    (place.path / "plugins" / "broken.py").write_text(
        "from fake_backends import plain\nimport dataclasses\n"
        "plugin = dataclasses.replace(plain, name='broken', bench_launch='broken')\n"
        "FIRST_COLLECTIVE = 'print(1 / 0)'\n"
        "def starts(python, script, nproc, port):\n    return {'by hand': [([python, script], {})] * nproc}\n"
    )
    info = place.path / "plugins" / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[unidist.backends]\nbroken = broken:plugin\n")
    ended = place.run("bench", "launch", "--backend", "broken")
    assert ended.code == 1
    assert "by hand failed" in ended.err
    assert "ZeroDivisionError" in ended.err

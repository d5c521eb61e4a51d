"""The backend of examples/plugin, a package of its own: the core takes it as it takes its own, and knows nothing of it.

It is installed nowhere. What pip would write down of it is put beside it on PYTHONPATH.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from project import ROOT
from unidist.testing import conformance

PLUGIN = ROOT / "examples" / "plugin"
PATIENCE = 600  # seconds, for an environment that is built the first time


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory):
    """As pip would do it, from the package's own pyproject.toml."""
    project = (PLUGIN / "pyproject.toml").read_text()
    (entry,) = re.findall(r'^\[project\.entry-points\."unidist\.backends"\]\n(\w+ = )"(.*)"$', project, re.M)
    place = tmp_path_factory.mktemp("installed")
    info = place / "unidist_sockets-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: unidist-sockets\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(f"[unidist.backends]\n{''.join(entry)}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, PLUGIN, place))))
        yield


def unidist(*arguments: str, python: str = sys.executable) -> str:
    command = [python, "-m", "unidist", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, stdin=subprocess.DEVNULL)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


test_promises = conformance("sockets", zoo="unidist_sockets.zoo", world_sizes=(1, 2, 3))


def test_its_environment_is_built_from_its_own_recipe():
    python = unidist("setup", "sockets", "--print-python").strip()
    ask = [python, "-I", "-c", "import numpy, safetensors; print(numpy.__version__)"]
    version = subprocess.run(ask, capture_output=True, text=True, timeout=60, check=True).stdout
    assert f'"numpy=={version.strip()}"' in (PLUGIN / "unidist_sockets" / "__init__.py").read_text()
    listed = next(line for line in unidist("setup", "--list").splitlines() if line.startswith("sockets"))
    assert os.path.dirname(os.path.dirname(python)) in listed


def test_it_trains_in_that_environment_and_gives_the_same_numbers_at_any_size():
    python = unidist("setup", "sockets", "--print-python").strip()
    said = [
        unidist("run", "--backend=sockets", f"--nproc={n}", str(PLUGIN / "train.py"), python=python) for n in (1, 2)
    ]
    numbers = [list(map(float, re.findall(r"(?:loss|accuracy) (\S+)", each))) for each in said]
    assert numbers[0] == pytest.approx(numbers[1], abs=1e-4)
    loss, accuracy = numbers[0]
    assert loss < 0.1
    assert accuracy > 0.97


def test_its_step_is_measured():
    table = unidist("bench", "step", "--backend=sockets", "--rounds=2", "--steps=3")
    assert re.search(r"by hand +\d+\.\d+ +1\.000", table), table
    assert re.search(r"unidist +\d+\.\d+ +\d+\.\d+", table), table


def test_it_stands_in_the_table_of_backends():
    table = unidist("backends")
    assert re.search(r"^sockets +numpy \d", table, re.M), table
    assert "tiny has no data loader" in table


def test_the_page_that_explains_it_shows_its_code():
    """Line by line: the page leaves some out."""
    page = (ROOT / "docs" / "write-a-backend.md").read_text(encoding="utf-8")
    files = [*PLUGIN.rglob("*.py"), PLUGIN / "pyproject.toml", Path(__file__)]
    there = {line.strip() for file in files for line in file.read_text(encoding="utf-8").splitlines()}
    blocks = re.findall(r"^```(?:python|toml)\n(.*?)^```", page, re.S | re.M)
    shown = [line.strip() for block in blocks for line in block.splitlines()]
    assert len(shown) > 50
    assert [line for line in shown if line not in there] == []


def test_the_core_does_not_know_it():
    for path in (ROOT / "unidist").rglob("*.py"):
        assert "unidist_sockets" not in path.read_text(), path

"""Every test starts from a clean environment and leaves no process behind."""

import os
import subprocess
import sys

import pytest

from project import ROOT
from test_launch_support import Place

sys.path[:0] = [str(ROOT), str(ROOT / "backends")]  # the checkout under test, whatever is installed

FOREIGN = (
    "UNIDIST_",
    "TORCHELASTIC_",
    "HOROVOD_",
    "DMLC_",
    "SLURM_",
    "OMPI_",
    "PET_",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith(FOREIGN) and name != "UNIDIST_HOME":
            monkeypatch.delenv(name)


@pytest.fixture
def place(tmp_path):
    """Where a test of the launcher keeps its scripts; nothing that they started is left after it."""
    place = Place(tmp_path)
    yield place
    place.all_gone()


@pytest.fixture(autouse=True, scope="module")
def no_process_is_left_behind():
    before = children()
    yield
    left = children() - before
    assert not left, f"still running: {left}"


def children() -> set[str]:
    """Processes that carry unidist's job token in their environment, or are our own descendants."""
    rows = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    parents = {}
    for row in rows.splitlines():
        pid, ppid, args = row.split(None, 2)
        parents[int(pid)] = (int(ppid), args)
    found = set()
    for pid, (ppid, args) in parents.items():
        above = ppid
        while above in parents and above != os.getpid():
            above = parents[above][0]
        if above == os.getpid() and not args.startswith("ps "):
            found.add(f"{pid} {args}")
    return found

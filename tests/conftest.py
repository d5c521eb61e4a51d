"""Every test starts from a clean environment and leaves no process behind."""

import os
import signal
import subprocess
import sys
import time

import hypothesis
import pytest

from launch_support import Place
from project import ROOT

sys.path[:0] = [str(ROOT), str(ROOT / "backends")]  # the checkout under test, whatever is installed

# Its deadline of 200 ms for an example is a duration, which a busy machine exceeds.
hypothesis.settings.register_profile("unidist", deadline=None)
hypothesis.settings.load_profile("unidist")

# Where pytest runs in the background of a script, Ctrl-C is switched off, and what it starts would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

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
    until = time.monotonic() + 15.0  # rank 0's server outlives a refused meeting by some seconds
    while (left := children() - before) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left, f"still running: {left}"


def children() -> set[str]:
    """The living processes below this one."""
    rows = subprocess.run(["ps", "-eo", "pid=,ppid=,stat=,args="], capture_output=True, text=True, check=True).stdout
    parents = {}
    for row in rows.splitlines():
        pid, ppid, state, args = row.split(None, 3)
        if not state.startswith("Z"):  # a zombie is dead
            parents[int(pid)] = (int(ppid), args)
    found = set()
    for pid, (ppid, args) in parents.items():
        above = ppid
        while above in parents and above != os.getpid():
            above = parents[above][0]
        if above == os.getpid() and not args.startswith("ps "):
            found.add(f"{pid} {args}")
    return found

"""The end of another process, as its launcher sees it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from unidist.control import lineage
from unidist.control.lineage import Lineage

# A process that starts another, tells its number and lives on, as the daemon of a launcher does.
DAEMON = "sleep 1000 & echo $!; read _; kill $!; wait; echo ended; read _"


@pytest.fixture
def daemon() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(["sh", "-c", DAEMON], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_a_daemon_that_lives_on_is_not_waited_for(
    daemon: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lineage, "WRAPPERS", 0.1)
    assert daemon.stdin is not None
    assert daemon.stdout is not None
    rank = int(daemon.stdout.readline())
    started = Lineage(lineage.own().space, (rank, daemon.pid, os.getpid()))
    assert not started.wait_for_end(0.1), "it still runs"
    daemon.stdin.write("\n")
    daemon.stdin.flush()
    assert daemon.stdout.readline() == "ended\n"
    assert not started.wait_for_end(3600), "the daemon still runs"  # an hour would be the end of this test
    daemon.kill()
    daemon.wait()
    assert started.wait_for_end(3600)


def test_processes_of_another_machine_cannot_be_seen() -> None:
    assert not Lineage("another", (os.getpid(),)).wait_for_end(3600)

"""MXNet over several hosts, every process started by hand with MXNet's own variables: scheduler and server on h0, a
worker on h1 and on h2."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import Hosts, Started, curve, outcome

from project import CURVE
from unidist.launch.environments import interpreter_for

ROOT = Path(__file__).resolve().parents[2]


class Cluster(Started):
    def __init__(self, hosts: Hosts) -> None:
        super().__init__()
        self._hosts = hosts
        self._python, self._variables = interpreter_for("mxnet")

    def start(self, host: int, role: str, epochs: int, code: str = "", **env: str) -> subprocess.Popen[str]:
        """The example, or `code` in its place."""
        settings = {
            **self._variables,
            "OMP_NUM_THREADS": "1",
            "DMLC_ROLE": role,
            "DMLC_PS_ROOT_URI": "10.77.0.1",
            "DMLC_PS_ROOT_PORT": "9091",
            "DMLC_NUM_SERVER": "1",
            "DMLC_NUM_WORKER": "2",
            **env,
        }
        example = [str(ROOT / "examples" / "train.py"), f"--epochs={epochs}"]
        command = [self._python, *(["-c", code] if code else example)]
        return self.keep(self._hosts[host].start(command, env=settings))


@pytest.fixture
def cluster(hosts: Hosts) -> Iterator[Cluster]:
    made = Cluster(hosts)
    yield made
    made.close()


def test_three_hosts_train_the_example(cluster: Cluster) -> None:
    """The second host's worker is rank 0, though ps-lite itself counts the third host's first."""
    services = [cluster.start(0, "scheduler", 2), cluster.start(0, "server", 2)]
    workers = [cluster.start(host, "worker", 2, DMLC_WORKER_ID=str(host - 1)) for host in (1, 2)]
    *_, (_, printed, told), (_, other, _) = ended = outcome(*services, *workers)
    assert [code for code, *_ in ended] == [0, 0, 0, 0], ended
    assert curve(printed) == pytest.approx(CURVE, abs=1e-4)
    assert "2 processes on 2 nodes" in told
    assert other == ""


def test_a_scheduler_that_knows_itself_as_localhost(cluster: Cluster) -> None:
    """As long as the others know it by an address that leads there."""
    services = [cluster.start(0, "scheduler", 1, DMLC_PS_ROOT_URI="localhost"), cluster.start(0, "server", 1)]
    workers = [cluster.start(host, "worker", 1) for host in (1, 2)]
    ended = outcome(*services, *workers)
    assert [code for code, *_ in ended] == [0, 0, 0, 0], ended


def test_localhost_on_several_hosts(cluster: Cluster) -> None:
    """Nobody finds the others, and each says why, in time."""
    script = "import unidist; unidist.Strategy('mxnet', timeout=8)"
    roles = [(0, "scheduler"), (0, "server"), (1, "worker"), (2, "worker")]
    started = [cluster.start(host, role, 0, script, DMLC_PS_ROOT_URI="localhost") for host, role in roles]
    scheduler, server, *workers = outcome(*started)
    assert [code for code, *_ in (scheduler, server, *workers)] == [1, 1, 1, 1], (scheduler, server, workers)
    for _, _, said in (scheduler, server):
        assert "ranks 0, 1 did not come" in said, said
        assert "by which no other host finds this one" in said, said
    for _, _, said in workers:
        assert "is the scheduler on this host? localhost is always the own host" in said, said


def test_a_host_that_dies_ends_the_others(cluster: Cluster, hosts: Hosts) -> None:
    """The cable of a worker's host is pulled in the middle of training: no goodbye, no reset."""
    services = [cluster.start(0, "scheduler", 10000), cluster.start(0, "server", 10000)]
    workers = [cluster.start(host, "worker", 10000, DMLC_WORKER_ID=str(host - 1)) for host in (1, 2)]
    printed = workers[0].stdout
    assert printed is not None
    while "epoch 1" not in (line := printed.readline()):
        assert line, workers[0].communicate()
    hosts.cut(2)
    try:
        scheduler, server, stayed, lost = outcome(*services, *workers)
    finally:
        hosts.heal(2)
    assert [scheduler[0], server[0], stayed[0], lost[0]] == [1, 1, 1, 1], (scheduler, server, stayed, lost)
    for _, _, said in (scheduler, server, stayed):
        assert re.search(r"PeerFailed: rank 1 on h2: ", said), said
    assert "the server of the job's meeting is gone" in lost[2]

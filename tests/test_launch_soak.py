"""Kills processes of real jobs at random moments, many times. Not for every day: UNIDIST_SOAK=20 says how often.

    UNIDIST_SOAK=20 pytest -s tests/test_launch_soak.py

The job is raw ps-lite (MXNet's KVStore: scheduler, server and two workers), which by itself would hang for ever when
one of them dies. It needs `unidist setup mxnet`.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from launch_support import Place
from unidist.setup import recipes, store

TIMES = int(os.environ.get("UNIDIST_SOAK", "0"))
SOON = 10.0  # all processes are gone within so many seconds

pytestmark = pytest.mark.skipif(not TIMES, reason="set UNIDIST_SOAK=20 to run it that many times")

PLUGIN = """
from dataclasses import dataclass
from unidist.backend import Plugin
from unidist.launch.plan import Process

@dataclass(frozen=True)
class Options:
    pass

def roles(job):
    env = {"DMLC_PS_ROOT_URI": job.host, "DMLC_PS_ROOT_PORT": str(job.ports[0]), "DMLC_NODE_HOST": job.host,
           "DMLC_NUM_SERVER": str(job.servers), "DMLC_NUM_WORKER": str(job.nproc)}
    for role, count in (("scheduler", 1), ("server", job.servers), ("worker", job.nproc)):
        for rank in range(count):
            yield Process(role, rank, job.command, {**env, "DMLC_ROLE": role}, job.host, role != "scheduler")

pslite = Plugin("pslite", "pslite:Backend", Options, requires=("mxnet",), plan=roles)
"""

SCRIPT = """
def nap():
    return child(start_new_session=True)  # like a DataLoader's worker, but harder to reach
nap()
open(os.path.join(os.environ["WHO"], f"{role} {rank}"), "w").write(str(os.getpid()))
import mxnet as mx  # a scheduler or server stays in here
kv = mx.kv.create("dist_sync")
kv.init(0, mx.nd.zeros(1000))
while True:
    kv.push(0, mx.nd.ones(1000))
    out = mx.nd.zeros(1000)
    kv.pull(0, out=out)
    out.wait_to_read()
"""


@pytest.mark.parametrize("victim", ["worker 0", "worker 1", "server 0", "scheduler 0", "launcher", "supervisor"])
@pytest.mark.parametrize("time_number", range(TIMES))
def test_soak(tmp_path: Path, victim: str, time_number: int) -> None:
    environment = store.find(recipes.recipe_of("mxnet"), "mxnet")
    assert environment, "run `python -m unidist setup mxnet` first"
    place = Place(tmp_path)
    info = tmp_path / "plugins" / "pslite-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pslite\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[unidist.backends]\npslite = pslite:pslite\n")
    (tmp_path / "plugins" / "pslite.py").write_text(PLUGIN)
    who = tmp_path / "who"
    who.mkdir()
    place.env["WHO"] = str(who)
    place.python = str(environment.python)
    process = place.start("run", "-b", "pslite", "-n", "2", "--servers", "1", place.script(SCRIPT))
    place.wait_for_pids(8)
    while len(list(who.iterdir())) < 4:
        time.sleep(0.02)
    delay = random.uniform(0, 4)
    time.sleep(delay)
    if victim == "launcher":
        pid = process.pid
    elif victim == "supervisor":
        pid = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
    else:
        pid = int((who / victim).read_text())
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    ended = place.end(process)
    place.all_gone()
    took = time.monotonic() - killed
    first = ended.summary[0] if ended.summary else "(no summary: the launcher is dead)"
    print(f"\n{victim} killed after {delay:.1f} s: code {ended.code}, all gone in {took:.1f} s; {first}")
    assert ended.code not in (0, None)
    assert took < SOON
    if victim not in ("launcher", "supervisor"):
        name = "scheduler" if victim == "scheduler 0" else victim
        assert re.match(rf"unidist: {name} on \S+ failed first: killed by SIGKILL", first)
        assert ended.code == 137

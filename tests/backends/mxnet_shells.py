"""A scheduler, a server and two workers of MXNet's, started by hand: the same script in four shells."""

import contextlib
import json
import os
import subprocess
import time

from unidist.launch.environments import interpreter_for
from unidist.launch.ports import Ports

SCRIPT = """
import sys
import unidist

with unidist.Strategy() as strategy:
    from unidist_mxnet import zoo
    from unidist.testing import reference

    model, optimizer = strategy.prepare(zoo.mlp(), unidist.SGD(0.1))
    step = strategy.train_step(model, optimizer, zoo.cross_entropy)
    loader = strategy.loader(reference.data(16), per_device_batch=4)
    losses = [strategy.mean(step(x, y)) for x, y in loader]
    strategy.print("trained", strategy.all_gather(strategy.rank), strategy.local_rank, len(losses))
    while "for ever" in sys.argv:
        for x, y in loader:
            step(x, y).wait_to_read()
"""


def variables_of(way, name, common):
    """What each way to start adds to the variables that all have in common. Worker a is the second one."""
    role, _, letter = name.partition(" ")
    index = int(letter == "a")
    if way == "launch.py" and role != "scheduler":  # MXNet's tools/launch.py --launcher local
        number = {"worker": index, "server": 2}[role]
        return {"DMLC_TASK_ID": str(number), "DMLC_JOB_CLUSTER": "local"}
    if way == "MXJob":
        address = {"url": common["DMLC_PS_ROOT_URI"], "port": int(common["DMLC_PS_ROOT_PORT"])}
        pods = {"worker": 2, "server": 1}
        cluster = {
            kind: [{"url": f"job-{kind}-{n}", "port": 9091} for n in range(count)] for kind, count in pods.items()
        }
        config = {
            "cluster": {**cluster, "scheduler": [address]},
            "labels": dict.fromkeys(("scheduler", "server", "worker"), ""),
            "task": {"type": role, "index": index},
        }
        return {"MX_CONFIG": json.dumps(config), "DMLC_USE_KUBERNETES": "1"}
    return {}


@contextlib.contextmanager
def four_shells(folder, *arguments, way="by hand", script=SCRIPT, services=None, each=None, port=None, **env):
    """The same script in every process, with MXNet's own variables and nothing of unidist's launcher. `services` is
    what scheduler and server run instead; `each` has variables by the name of the process, or None to leave it out."""
    (folder / "train.py").write_text(script)
    python, variables = interpreter_for("mxnet")
    with Ports() as ports:
        port = port or ports.take(1)[0]
        common = {
            "DMLC_PS_ROOT_URI": "127.0.0.1",
            "DMLC_PS_ROOT_PORT": str(port),
            "DMLC_NUM_SERVER": "1",
            "DMLC_NUM_WORKER": "2",
            "OMP_NUM_THREADS": "1",
            "UNIDIST_SECRET": "of these four",
        }
        started = {}
        try:
            for name in ("scheduler", "server", "worker a", "worker b"):
                own = (each or {}).get(name, {})
                if own is None:
                    continue
                role = {"DMLC_ROLE": name.split()[0]}
                command = [str(folder / "train.py"), *arguments]
                started[name] = subprocess.Popen(
                    [python, *(services if services and not name.startswith("worker") else command)],
                    env={**os.environ, **variables, **common, **role, **variables_of(way, name, common), **env, **own},
                    stdout=(folder / name).open("w"),
                    stderr=subprocess.STDOUT,
                )
            yield started
        finally:
            for process in started.values():
                process.kill()
                process.wait()


def outputs(folder, names):
    return {name: (folder / name).read_text() for name in names}


def until_trained(folder, started):
    until = time.monotonic() + 120
    while "trained" not in (folder / "worker a").read_text() + (folder / "worker b").read_text():
        assert time.monotonic() < until, outputs(folder, started)
        assert all(process.poll() is None for process in started.values()), outputs(folder, started)
        time.sleep(0.2)

"""Horovod started in every way: by `unidist run`, by horovodrun and by hand; and what a job says while it runs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from example_runs import OF_TORCH, curve, finish, start
from project import ROOT, free_port
from unidist.launch.environments import interpreter_for

TRAIN = [str(ROOT / "examples" / "train.py"), "--epochs=5"]


def environment() -> tuple[str, dict[str, str]]:
    python, variables = interpreter_for("horovod")
    path = os.pathsep.join([str(Path(python).parent), os.environ["PATH"]])
    return python, {**os.environ, **variables, "OMP_NUM_THREADS": "1", "PATH": path}


@pytest.mark.parametrize(("framework", "tolerance"), [("torch", 1e-5), ("mxnet", 1e-4)])
def test_the_example_learns_what_torch_learns(framework, tolerance):
    options = ["--backend=horovod", "--nproc=2", f"--option=framework={framework}"]
    _, env = environment()
    output = finish(start([sys.executable, "-m", "unidist", "run", *options, *TRAIN], {**env, "PYTHONPATH": str(ROOT)}))
    assert curve(output) == pytest.approx(OF_TORCH, abs=tolerance)


def test_horovodrun():
    python, env = environment()
    output = finish(start([python, "-m", "horovod.runner.launch", "--gloo", "-np", "2", python, *TRAIN], env))
    assert curve(output) == pytest.approx(OF_TORCH, abs=1e-5)
    assert "from horovod (HOROVOD_RANK is set)" in output


def test_horovodrun_names_the_rank_that_failed():
    """Not the one that lost it."""
    python, env = environment()
    env |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "backends")]), "UNIDIST_BACKEND": "horovod"}
    launcher = [python, "-m", "horovod.runner.launch", "--gloo", "-np", "2"]
    job = start([*launcher, python, "-m", "unidist.testing.scenario", "raises"], env)
    output, _ = job.communicate(timeout=300)
    assert job.returncode == 1, output
    assert "[1]<stderr>:RuntimeError: the victim's own error" in output
    assert "Process name: 1\nExit code: 1" in output, output


def start_by_hand(arguments: list[str], env: dict[str, str]) -> list[subprocess.Popen]:
    """Ranks 1 and 0, with Horovod's variables and no launcher."""
    python, own = environment()
    common = {"SIZE": 2, "LOCAL_SIZE": 2, "CROSS_RANK": 0, "CROSS_SIZE": 1, "GLOO_RENDEZVOUS_ADDR": "127.0.0.1"}
    common["GLOO_RENDEZVOUS_PORT"] = free_port()
    ranks = []
    for rank in (1, 0):  # the other one is there first
        said = {f"HOROVOD_{name}": str(value) for name, value in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()}
        ranks.append(start([python, *arguments], {**own, **env, **said}))
    return ranks


def test_variables_set_by_hand():
    """No launcher keeps values for the ranks: they meet at the address all the same."""
    assert curve(finish(*start_by_hand(TRAIN, {}))) == pytest.approx(OF_TORCH, abs=1e-5)


@pytest.mark.parametrize("framework", ["torch", "mxnet"])
def test_a_rank_lost_while_leaving_is_said(framework, tmp_path):
    """No launcher ends the other one, which has come to its end already: it says why it cannot, and fails too."""
    script = (
        "import time, unidist\n"
        "with unidist.Strategy() as strategy:\n"
        "    strategy.barrier()\n"
        "    if strategy.rank == 1:\n"
        "        time.sleep(1)\n"
        "        raise RuntimeError('the culprit')\n"
    )
    (tmp_path / "script.py").write_text(script)
    env = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "backends")])}
    env |= {"UNIDIST_BACKEND": "horovod", "UNIDIST_OPTIONS": json.dumps({"framework": framework})}
    culprit, other = start_by_hand([str(tmp_path / "script.py")], env)
    said, lost = (each.communicate(timeout=300)[0] for each in (culprit, other))
    assert "RuntimeError: the culprit" in said
    assert re.search(r"PeerFailed: rank 1 on \S+: RuntimeError: the culprit; rank 0 on \S+ ends with it", lost), lost
    assert culprit.returncode == 1
    assert other.returncode != 0


def launch(tmp_path: Path, script: str, **options: object) -> subprocess.Popen:
    """Two processes of it by `unidist run`."""
    (tmp_path / "script.py").write_text(script)
    said = [f"--option={name}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "unidist", "run", "--backend=horovod", "--nproc=2", *said]
    return start([*command, str(tmp_path / "script.py")], {**environment()[1], "PYTHONPATH": str(ROOT)})


def test_timeline_and_fusion(tmp_path):
    """The timeline names the gradients of the model, and tells that they were joined. An optimizer that joins them by
    itself is refused."""
    script = (
        "import horovod.torch as hvd, numpy as np, torch, unidist\n"
        "with unidist.Strategy() as strategy:\n"
        "    net = torch.nn.Linear(4, 2)\n"
        "    model, optimizer = strategy.prepare(net, unidist.SGD(0.1))\n"
        "    step = strategy.train_step(model, optimizer, lambda m, x: m(x).mean())\n"
        "    [step(x) for x in strategy.loader(np.ones((16, 4), np.float32), per_device_batch=4)]\n"
        "    try:\n"
        "        strategy.prepare(net, hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1)))\n"
        "    except unidist.UnidistError as error:\n"
        "        print(error)\n"
    )
    timeline = tmp_path / "timeline.json"
    job = launch(tmp_path, script, framework="torch", timeline=timeline, fusion_threshold_mb=8, cycle_time_ms=2)
    assert finish(job).count("average gradients a second time") == 2
    text = timeline.read_text()
    names = {event["args"]["name"] for event in json.loads(text) if "name" in event.get("args", {})}
    assert any("gradients of model 1, weight to bias" in name for name in names), names
    assert "MEMCPY_IN_FUSION_BUFFER" in text


def test_gluon_script_that_leaves_its_strategy_open(tmp_path):
    """It ends with steps that are still queued, and they are made."""
    script = (
        "import mxnet as mx, unidist\n"
        "strategy = unidist.Strategy()\n"
        "net = mx.gluon.nn.Dense(1024, in_units=1024)\n"
        "net.initialize()\n"
        "model, optimizer = strategy.prepare(net, unidist.SGD(0.1))\n"
        "step = strategy.train_step(model, optimizer, lambda m, x: m(x).mean())\n"
        "[step(mx.nd.ones((8, 1024))) for _ in range(4)]\n"
    )
    assert "shut down" not in finish(launch(tmp_path, script, framework="mxnet"))


@pytest.mark.parametrize(("framework", "names"), [("torch", "gradients of model 1"), ("mxnet", "gradients ")])
def test_stall_is_told_with_ranks_and_names(framework, names, tmp_path):
    """Rank 1 is busy elsewhere while rank 0 waits for its gradients."""
    script = (
        "import time, unidist\n"
        f"from unidist_{framework} import zoo\n"
        "from unidist.testing.reference import data\n"
        "with unidist.Strategy() as strategy:\n"
        "    model, optimizer = strategy.prepare(zoo.mlp(), unidist.SGD(0.1))\n"
        "    step = strategy.train_step(model, optimizer, zoo.cross_entropy)\n"
        "    for number, (x, y) in enumerate(strategy.loader(data(32), per_device_batch=4)):\n"
        "        if strategy.rank == 1 and number == 2:\n"
        "            time.sleep(100)\n"
        "        strategy.mean(step(x, y))\n"
    )
    job = launch(tmp_path, script, framework=framework, stall_warning=1)
    waiting = next((line for line in job.stdout if names in line), None)
    job.terminate()
    rest, _ = job.communicate(timeout=60)
    assert waiting is not None, rest
    assert waiting.startswith("[worker 0] 1: ["), waiting  # rank 0 says that rank 1 is missing

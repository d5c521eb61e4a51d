"""The scripts that people copy, started the ways in which people start them."""

import os
import re
import sys

import pytest

import on_ranks
import unidist
from example_runs import TIMEOUT, curve, finish, start
from project import ROOT, free_port
from unidist.launch.environments import interpreter_for


def environment(backend: str) -> tuple[str, dict[str, str]]:
    python, variables = interpreter_for(backend)
    return python, {**os.environ, **variables, "OMP_NUM_THREADS": "1"}


def launcher(way: str, python: str) -> list[str]:
    return {
        "plain python": [python],
        "torchrun": [python, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"],
        "torch.distributed.launch": [
            *[python, "-W", "ignore", "-m", "torch.distributed.launch", "--nproc_per_node=2"],
            f"--master_port={free_port()}",
        ],
        "unidist run": [sys.executable, "-m", "unidist", "run", "--backend=torch", "--nproc=2"],
        "unidist run, 3 processes": [sys.executable, "-m", "unidist", "run", "--backend=torch", "--nproc=3"],
    }[way]


@pytest.fixture(scope="module")
def plain_curve() -> list[float]:
    python, env = environment("torch")
    output = finish(start([python, "examples/train.py", "--epochs=3"], env))
    assert "1 process on 1 node from none" in output
    assert len(curve(output)) == 3
    return curve(output)


@pytest.mark.parametrize(
    ("way", "named"),
    [
        ("torchrun", "torchrun (TORCHELASTIC_RUN_ID is set)"),
        ("torch.distributed.launch", "torchrun (TORCHELASTIC_RUN_ID is set)"),
        ("unidist run", "unidist (UNIDIST_RANK is set)"),
        ("unidist run, 3 processes", "unidist (UNIDIST_RANK is set)"),
    ],
)
def test_same_loss_curve_however_it_is_started(way, named, plain_curve):
    python, env = environment("torch")
    output = finish(start([*launcher(way, python), "examples/train.py", "--epochs=3"], env))
    assert named in output
    assert curve(output) == pytest.approx(plain_curve, abs=1e-5)


def test_the_quickstart_is_in_the_readme_and_prints_the_same_losses_on_two_processes():
    script = ROOT / "examples" / "quickstart.py"
    assert script.read_text().partition('"""\n\n')[2] in (ROOT / "README.md").read_text()
    python, env = environment("torch")
    alone = finish(start([python, str(script)], env))
    together = finish(start([*launcher("unidist run", python), str(script)], env))
    assert len(curve(alone)) == 5
    assert curve(alone)[-1] < 1e-3
    assert curve(together) == pytest.approx(curve(alone), rel=1e-3, abs=1e-6)


def test_the_demo_learns():
    output = finish(start([*launcher("unidist run", ""), "examples/train.py"], dict(os.environ)))
    accuracy = re.findall(r"accuracy (\S+)", output)
    assert float(accuracy[-1]) > 0.95, output


@pytest.mark.parametrize("init", ["tcp", "file"])
def test_three_terminals(init, tmp_path):
    python, env = environment("torch")
    where = f"tcp://127.0.0.1:{free_port()}" if init == "tcp" else f"file://{tmp_path}/meet"
    terminals = [
        start(
            [python, "examples/three_terminals.py", f"--init-method={where}", f"--rank={rank}", "--world-size=3"], env
        )
        for rank in range(3)
    ]
    outputs = [finish(terminal) for terminal in terminals]
    losses = curve(outputs[0])
    assert len(losses) == 3
    assert losses[-1] < losses[0] / 2
    assert [curve(output) for output in outputs[1:]] == [[], []]
    assert not (tmp_path / "meet").exists()


def test_a_function_on_two_processes():
    """`unidist.launch`, as from a notebook."""
    assert unidist.launch(on_ranks.add_ranks, nproc=2, backend="torch", args=(10,)) == [11.0, 11.0]


def test_training_goes_on_and_predicts_on_other_numbers_of_processes(tmp_path):
    """Three epochs at once; one epoch on 3 processes, then two more on 2; inference on 3."""
    run = [sys.executable, "-m", "unidist", "run", "--backend=torch"]
    whole = finish(start([*run, "--nproc=2", "examples/train.py", "--epochs=3"], dict(os.environ)))
    place = f"--checkpoint={tmp_path / 'digits'}"
    # The rate falls to 0 at --epochs, so the first part must know of all three: it is ended after its first epoch.
    first = start([*run, "--nproc=3", "examples/train.py", "--epochs=3", place], dict(os.environ))
    for line in first.stdout:
        if "epoch 2" in line:
            break
    first.terminate()
    first.communicate(timeout=TIMEOUT)
    resumed = finish(start([*run, "--nproc=2", "examples/train.py", "--epochs=3", place], dict(os.environ)))
    left = len(curve(resumed))
    assert 1 <= left <= 2
    assert curve(resumed) == pytest.approx(curve(whole)[-left:], abs=1e-5)
    accuracy = re.findall(r"accuracy (\S+)", resumed)[-1]
    where = str(tmp_path / "digits")
    predicted = finish(start([*run, "--nproc=3", "examples/inference.py", where, "--batch=50"], dict(os.environ)))
    assert f"360 digits, accuracy {accuracy}" in predicted

"""How torch's ranks come together: bad starts are explained in time, and one Strategy may follow another."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from pathlib import Path

import pytest

import bad_starts
import on_ranks
import unidist
from unidist.launch.environments import interpreter_for


@pytest.mark.parametrize("case", bad_starts.CASES, ids=lambda case: case.__name__)
def test_bad_start(case: bad_starts.Case, tmp_path: Path) -> None:
    bad_starts.check(case, "torch", tmp_path)


def test_twelve_strategies_in_a_row() -> None:
    assert unidist.launch(on_ranks.twelve_in_a_row, 2, "torch") == [12, 12]


DYING = """
import os, sys, time
import torch, unidist
with unidist.Strategy("torch", timeout=120) as strategy:
    model, optimizer = strategy.prepare(torch.nn.Linear(4, 1), unidist.SGD(0.1))
    step = strategy.train_step(model, optimizer, lambda m, x: m(x).mean())
    for n in range(100000):
        step(torch.ones(2, 4))
        if n == 20 and strategy.rank == 1:
            {way}
"""


@pytest.mark.parametrize(
    ("way", "cause"),
    [
        ("os._exit(0)", "ended in mid-training without closing its Strategy"),
        ("raise ValueError('boom')", "ValueError: boom"),
    ],
)
def test_survivors_under_torchrun_name_who_died(way: str, cause: str, tmp_path: Path) -> None:
    python, variables = interpreter_for("torch")
    (tmp_path / "train.py").write_text(DYING.format(way=way))
    paths = os.pathsep.join(map(str, (bad_starts.ROOT, bad_starts.ROOT / "backends")))
    ended = subprocess.run(
        [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", str(tmp_path / "train.py")],
        env={**os.environ, **variables, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=bad_starts.PATIENCE,
    )
    assert ended.returncode != 0
    for rank in (0, 2):
        pattern = rf"^unidist: PeerFailed: rank 1 on \S+: {re.escape(cause)}.*; rank {rank} on \S+ ends with it$"
        assert re.search(pattern, ended.stderr, re.M), ended.stderr


FORKS = """
import multiprocessing, time
import unidist
fork = multiprocessing.get_context("fork")
with unidist.Strategy("torch") as strategy:
    for _ in range(200):
        child = fork.Process(target=time.sleep, args=(60,))
        child.start()
        child.terminate()
        child.join()
        assert child.exitcode == -15, child.exitcode
    strategy.barrier()
print("all children were ended")
"""


def by_hand(script: str, folder: Path, size: int = 2) -> list[tuple[int, str]]:
    """The codes and outputs of ranks that nobody watches but themselves."""
    python, variables = interpreter_for("torch")
    (folder / "train.py").write_text(script)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = os.pathsep.join(map(str, (bad_starts.ROOT, bad_starts.ROOT / "backends")))
    env = {**os.environ, **variables, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(size)}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = [
        subprocess.Popen(
            [python, str(folder / "train.py")],
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        said = [each.communicate(timeout=bad_starts.PATIENCE)[0] for each in started]
    finally:
        for each in started:
            each.kill()
    return [(each.returncode, text) for each, text in zip(started, said, strict=True)]


def test_to_terminate_a_young_child_does_not_end_its_rank(tmp_path: Path) -> None:
    for code, output in by_hand(FORKS, tmp_path):
        assert code == 0, output
        assert output.splitlines()[-1] == "all children were ended"


ENDS = """
import atexit, multiprocessing, os, sys, time
import unidist
atexit.register(lambda: print("handler"))
written = open(sys.argv[0] + os.environ["RANK"], "w")
written.write("all of it")
if os.environ["RANK"] == "1":
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)
    child.start()
with unidist.Strategy("torch") as strategy:
    try:
        raise KeyError("reported")
    except KeyError:
        sys.excepthook(*sys.exc_info())
    strategy.barrier()
    if strategy.rank == 1:
        atexit.register(lambda: print("ended", child.pid))
        raise ValueError("of rank 1")
    strategy.barrier()
"""


def test_a_failed_rank_ends_as_python_does(tmp_path: Path) -> None:
    """What is reported by a call of sys.excepthook is no failure."""
    survivor, (code, output) = by_hand(ENDS, tmp_path)
    assert survivor[0] == code == 1
    assert re.search(r"PeerFailed: rank 1 on \S+: ValueError: of rank 1; rank 0 on", survivor[1]), survivor[1]
    *_, ended, handler = output.splitlines()
    assert handler == "handler"
    assert not Path(f"/proc/{ended.split()[1]}").exists()
    assert output.count("handler") == 1
    assert (tmp_path / "train.py1").read_text() == "all of it"

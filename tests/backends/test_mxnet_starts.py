"""MXNet started badly by hand: everyone hears what is wrong, in time, and no native stack is shown."""

import re
import socket

import pytest
from mxnet_shells import SCRIPT, four_shells, outputs

import bad_starts

START = "import os, unidist\nunidist.Strategy(timeout=8, update_on=os.environ.get('UPDATE_ON', 'auto'))\n"
WORKERS = ("worker a", "worker b")
ALL = ("scheduler", "server", *WORKERS)

# What is wrong: variables of single processes (None: it is not started), then what each of these says.
BAD = {
    "no server": ({"server": None}, {name: "the server did not come" for name in ("scheduler", *WORKERS)}),
    "workers differ": (
        {"worker b": {"DMLC_NUM_WORKER": "3"}},
        {name: "3 workers, 1 server, 1 scheduler on a worker without a number" for name in ALL},
    ),
    "servers differ": (
        {"server": {"DMLC_NUM_SERVER": "2", "DMLC_NUM_WORKER": "1"}},
        {name: "1 worker, 2 servers, 1 scheduler on a server without a number" for name in ALL},
    ),
    "options differ": (
        {"worker b": {"UPDATE_ON": "server"}},
        {name: "the options differs" for name in ALL},
    ),
    "secrets differ": ({"worker b": {"UNIDIST_SECRET": "another"}}, {"worker b": "UNIDIST_SECRET differs"}),
    "address of nobody": (
        {name: {"DMLC_PS_ROOT_URI": "127.0.0.99"} for name in ("server", *WORKERS)},
        {name: "nobody listens there" for name in ("server", *WORKERS)},
    ),
}


def check(started, folder, words):
    codes = {name: process.wait(90) for name, process in started.items()}
    said = outputs(folder, codes)
    assert set(codes.values()) == {1}, said
    for name, text in said.items():
        assert words.get(name, "unidist.errors") in text, said
        assert not re.search("Stack trace|Check failed", text), said


@pytest.mark.parametrize("case", bad_starts.CASES, ids=lambda case: case.__name__)
def test_bad_starts_of_any_engine(case, tmp_path):
    bad_starts.check(case, "mxnet", tmp_path)


@pytest.mark.parametrize("wrong", BAD)
def test_bad_start(tmp_path, wrong):
    each, words = BAD[wrong]
    with four_shells(tmp_path, script=START, each=each) as started:
        check(started, tmp_path, words)


def test_a_stranger_behind_the_schedulers_port_is_passed_by(tmp_path):
    """The scheduler hosts the meeting at the next port that is free."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        four_shells(tmp_path, port=server.getsockname()[1] - 1) as started,
    ):
        codes = {name: process.wait(120) for name, process in started.items()}
    said = outputs(tmp_path, codes)
    assert set(codes.values()) == {0}, said
    assert "trained [0, 1]" in said["worker a"] + said["worker b"]


def test_a_second_strategy_is_refused_before_anybody_waits(tmp_path):
    again = "\ntry:\n    unidist.Strategy()\nexcept unidist.errors.StateError as error:\n    print('refused:', error)\n"
    with four_shells(tmp_path, script=SCRIPT + again) as started:
        codes = {name: process.wait(120) for name, process in started.items()}
    said = outputs(tmp_path, codes)
    assert set(codes.values()) == {0}, said
    for name in WORKERS:
        assert "refused: a distributed KVStore was closed in this process" in said[name], said


LEAVES = {
    "raises": ("raise ValueError('of mine')", "ValueError: of mine"),
    "sys.exit(0)": ("sys.exit(0)", r"sys.exit(0) has left its Strategy"),
    "os._exit(0)": ("import os; os._exit(0)", "ended in mid-training"),
}


@pytest.mark.parametrize("how", LEAVES)
def test_a_worker_that_leaves_in_mid_training_ends_all_others(tmp_path, how):
    leave, words = LEAVES[how]
    script = SCRIPT.replace(
        '    while "for ever"', f'    if strategy.rank == 1:\n        {leave}\n    while "for ever"'
    )
    with four_shells(tmp_path, "for ever", script=script, way="launch.py") as started:
        codes = {name: process.wait(120) for name, process in started.items()}
    said = outputs(tmp_path, codes)
    assert codes.pop("worker a") == (1 if how == "raises" else 0), said  # launch.py's second worker is rank 1
    assert set(codes.values()) == {1}, said
    for name in codes:
        first = next(line for line in said[name].splitlines() if "PeerFailed" in line)
        assert first.startswith("unidist: PeerFailed: rank 1 on "), said
        assert words in first, said


ALIKE = {
    "sys.exit(0)": ("sys.exit(0)", "pass"),
    "caught": ("raise ValueError", "import atexit; atexit.register(lambda: (time.sleep(7), print('uploaded')))"),
}


@pytest.mark.parametrize("how", ALIKE)
def test_all_workers_leave_alike_after_an_error(tmp_path, how):
    """The services end well with them. A worker has all the time it needs at its end."""
    inside, caught = ALIKE[how]
    script = "import sys, time, unidist\ntry:\n    with unidist.Strategy() as strategy:\n        strategy.barrier()\n"
    script += f"        {inside}\nexcept ValueError:\n    {caught}\n"
    with four_shells(tmp_path, script=script) as started:
        codes = {name: process.wait(120) for name, process in started.items()}
    said = outputs(tmp_path, codes)
    assert set(codes.values()) == {0}, said
    for name in WORKERS:
        assert ("uploaded" in said[name]) == (how == "caught"), said

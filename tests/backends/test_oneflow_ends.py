"""How OneFlow's ranks end, well or not: whoever is left behind ends too, with the cause. On real processes."""

import socket
from pathlib import Path

import pytest
from oneflow_support import outcome

pytest_plugins = ["oneflow_support"]


@pytest.mark.parametrize("closed", [True, False], ids=["with", "never closed"])
@pytest.mark.parametrize(
    ("last", "code", "said"),
    [
        ("raise KeyError('the last rank is wrong')", 1, "KeyError: 'the last rank is wrong'"),
        ("sys.exit(7)", 7, "sys.exit(7) has left its Strategy"),
        ("sys.exit(0)", 0, "sys.exit(0) has left its Strategy"),
        ("import os; os._exit(0)", 0, "ended in mid-training"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, "ended in mid-training"),
    ],
)
def test_whoever_is_left_ends_with_the_cause(ranks, port, last, code, said, closed):
    """Without a launcher of ours. OneFlow would hang, or abort with a C++ stack."""
    script = ranks.script(steps=10**9, last=last)
    if not closed:
        script.write_text(
            script.read_text().replace("with unidist", "if strategy := unidist").replace(" as strategy", "")
        )
        if "sys.exit" in last:
            code, said = code or 1, "ended in mid-training without closing its Strategy"
    master, survivor, (last_code, _) = outcome(*ranks.start_all(script, script, script, port=port))
    assert last_code == code
    for survivor_code, output in (master, survivor):
        assert survivor_code == 1, output
        [line] = [each for each in output.splitlines() if not each.startswith("unidist 0.")]
        assert line.startswith(f"unidist: PeerFailed: rank 2 on {socket.gethostname()}: {said}")


BUSY = """
import os, sys, time
import unidist
try:
    with unidist.Strategy("oneflow") as strategy:
        strategy.barrier()
        if strategy.rank == {leaver}:
            {leaves}
        time.sleep(9)  # longer than OneFlow bears the loss of another
        {then}
except ValueError:
    pass
print("done")
"""


@pytest.mark.parametrize("leaver", [0, 1])
@pytest.mark.parametrize("leaves", ["sys.exit(0)", "raise ValueError('kept')"])
def test_who_leaves_while_another_is_busy_is_named_when_it_is_needed(ranks, port, tmp_path, leaver, leaves):
    """OneFlow would abort the busy one with a C++ stack, and the leaver would look like a success."""
    script = tmp_path / "train.py"
    script.write_text(BUSY.format(leaver=leaver, leaves=leaves, then="strategy.barrier()"))
    ends = outcome(*ranks.start_all(script, script, port=port))
    code, output = ends[1 - leaver]
    assert code == 1, output
    said = "sys.exit(0) has left its Strategy" if "exit" in leaves else "ValueError: kept"
    [line] = [each for each in output.splitlines() if not each.startswith("unidist 0.")]
    assert line.startswith(f"unidist: PeerFailed: rank {leaver} on {socket.gethostname()}: {said}")
    assert ends[leaver][0] == 0


def test_those_who_leave_alike_wait_for_each_other(ranks, port, tmp_path):
    """Each in its own time; nobody is aborted, and nobody blamed."""
    script = tmp_path / "train.py"
    script.write_text(BUSY.format(leaver=0, leaves="raise ValueError", then="raise ValueError"))
    for code, output in outcome(*ranks.start_all(script, script, port=port)):
        assert code == 0, output
        assert output.splitlines()[-1] == "done"


def test_all_end_without_closing_the_strategy(ranks, port):
    script = ranks.script()
    script.write_text(script.read_text().replace("with unidist", "if strategy := unidist").replace(" as strategy", ""))
    first, second = outcome(*ranks.start_all(script, script, port=port))
    assert first[0] == second[0] == 0, (first, second)
    assert first[1].splitlines()[-1] == "ranks [0, 1]"


ENDS = """
import atexit, os, sys, threading, time
import unidist
atexit.register(lambda: print("handler of before"))
written = open(sys.argv[0] + os.environ["RANK"], "w")
written.write("all of it")
def work():
    time.sleep(3)
    print("thread")
try:
    with unidist.Strategy("oneflow") as strategy:
        atexit.register(lambda: print("handler of after"))
        threading.Thread(target=work).start()
        strategy.barrier()
        {inside}
except ValueError:
    {caught}
"""


@pytest.mark.parametrize(
    ("inside", "caught", "code"),
    [
        ("raise ValueError", "raise SystemExit(4)", 4),
        ("raise ValueError", "pass", 0),
        ("raise SystemExit(5)", "pass", 5),
        ("sys.excepthook = lambda *_: None; raise KeyError", "pass", 1),
    ],
)
def test_a_failed_rank_ends_as_python_does(ranks, port, tmp_path, inside, caught, code):
    """With its own code, and after all that Python does at the end; only OneFlow's part is left out."""
    script = tmp_path / "train.py"
    script.write_text(ENDS.format(inside=inside, caught=caught))
    size = 1 if "KeyError" in inside else 2  # of several that raise, all but the first end with it
    for rank, (own_code, output) in enumerate(outcome(*ranks.start_all(*[script] * size, port=port))):
        assert own_code == code, output
        assert output.split("thread\n")[1] == "handler of after\nhandler of before\n"
        assert Path(f"{script}{rank}").read_text() == "all of it"


def test_a_script_that_does_not_leave_well_does_not_hang(ranks):
    """One process alone: its traceback, its code."""
    [(code, output)] = outcome(ranks.start(ranks.script(last="raise KeyError('alone')")))
    assert code == 1
    assert output.strip().splitlines()[-1] == "KeyError: 'alone'"

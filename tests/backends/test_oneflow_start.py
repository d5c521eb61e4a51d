"""What makes OneFlow "wait for ever" is named at the start, and whoever is left behind ends too: on real processes."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import bad_starts
from unidist.launch.environments import interpreter_for
from unidist_oneflow import start

PATIENCE = 120.0  # seconds for anything here: a hang is a failure

TRAIN = """
import sys
import unidist
options = {options}
with unidist.Strategy("oneflow", timeout={timeout}, **options) as strategy:
    for step in range({steps}):
        strategy.all_reduce(step, "sum")
        if step == 3 and strategy.rank == strategy.world_size - 1:
            {last}
    strategy.print("ranks", strategy.all_gather(strategy.rank))
"""


class Ranks:
    """Processes of a script, started one by one, and ended with the test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[subprocess.Popen[str]] = []
        self.python, self._env = interpreter_for("oneflow")

    def script(self, name="train.py", *, timeout=60, steps=4, last="pass", comment="", **options) -> Path:
        path = self._folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(TRAIN.format(options=options, timeout=timeout, steps=steps, last=last) + comment)
        return path

    def start(self, script: Path, prefix=(), **variables) -> subprocess.Popen[str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith("UNIDIST_")}
        env |= {**self._env, "OMP_NUM_THREADS": "1", "UNIDIST_SECRET": "of these tests", "UNIDIST_BACKEND": "oneflow"}
        env |= {name: str(value) for name, value in variables.items()}
        process = subprocess.Popen(
            [self.python, *prefix, str(script)],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def start_all(self, *scripts: Path, port: int) -> list[subprocess.Popen[str]]:
        """As any launcher that sets RANK and WORLD_SIZE does."""
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": len(scripts)}
        return [self.start(script, RANK=rank, LOCAL_RANK=rank, **place) for rank, script in enumerate(scripts)]

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


@pytest.fixture
def ranks(tmp_path):
    made = Ranks(tmp_path)
    yield made
    made.close()


@pytest.fixture
def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def outcome(*processes: subprocess.Popen[str]) -> list[tuple[int, str]]:
    outputs = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def test_plain_variables(ranks, port):
    """And not a line of what the libraries print at their start."""
    script = ranks.script()
    (code, output), other = outcome(*ranks.start_all(script, script, port=port))
    assert code == 0, output
    assert output.splitlines()[-1] == "ranks [0, 1]"
    assert len(output.splitlines()) == 2, output
    assert other == (0, "")


def test_through_a_proxy_that_is_not_there(ranks, port, monkeypatch):
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://192.0.2.1:3128")
    script = ranks.script()
    for code, output in outcome(*ranks.start_all(script, script, port=port)):
        assert code == 0, output


def test_oneflows_own_launcher(ranks, port):
    launcher = ["-m", "oneflow.distributed.launch", "--nproc_per_node", "2", "--master_port", str(port)]
    [(code, output)] = outcome(ranks.start(ranks.script(), prefix=launcher))
    assert code == 0, output
    assert "ranks [0, 1]" in output


def test_one_script_starts_all_processes_of_the_node(ranks, port):
    script = ranks.script(gpu_device_num=2, ctrl_port=port, machine=[{"addr": "127.0.0.1"}], device="cpu")
    [(code, output)] = outcome(ranks.start(script))
    assert code == 0, output
    assert "[worker 0] ranks [0, 1]" in output


def test_imported_too_early(ranks):
    script = ranks.script()
    script.write_text("import oneflow\n" + script.read_text())
    [(code, output)] = outcome(ranks.start(script))
    assert code != 0
    assert "oneflow was imported before Strategy" in output


TWO_NODES = {"machine": "127.0.0.1,127.0.0.2"}

# name -> for each process: its variables, the options of its script, and what it must say
BAD_STARTS: dict[str, list[tuple[dict[str, object], dict[str, object], str]]] = {
    "options differ": [
        (
            {"RANK": rank, "UNIDIST_OPTIONS": options},
            {},
            "the options differs: none on rank 0.*view='consistent' on rank 1",
        )
        for rank, options in enumerate(("{}", '{"view": "consistent"}'))
    ],
    "a node is missing": [({}, {**TWO_NODES, "node_rank": 0}, "rank 1 of 2 did not come to 127.0.0.1")],
    "the master is missing": [({}, {**TWO_NODES, "node_rank": 1}, "nobody listens there")],
    "which node is this?": [({}, TWO_NODES, "nodes 0, 1 match")],
    "lists in another order": [
        ({}, {"machine": machine, "node_rank": 0}, "two processes say they are rank 0.*the options differs: machine=")
        for machine in ("127.0.0.1,127.0.0.2", "127.0.0.2,127.0.0.1")
    ],
}


@pytest.mark.parametrize("case", bad_starts.CASES, ids=lambda case: case.__name__)
def test_bad_starts_of_any_engine(case, tmp_path):
    bad_starts.check(case, "oneflow", tmp_path)


@pytest.mark.parametrize("name", BAD_STARTS)
def test_bad_starts_by_options(ranks, port, name):
    """None of them comes to OneFlow, which would wait for ever, or abort."""
    started = []
    for number, (variables, settings, _) in enumerate(BAD_STARTS[name]):
        options = {"timeout": 4, **settings}
        if "machine" in settings:
            options["ctrl_port"] = port
        else:
            variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2, **variables}
        started.append(ranks.start(ranks.script(f"{number}/train.py", **options), **variables))
    for (code, output), (_, _, said) in zip(outcome(*started), BAD_STARTS[name], strict=True):
        assert code == 1, output
        assert re.search(said, output), output


def test_two_nodes_on_one_host(ranks, port):
    """As the error advises that says that both match."""
    script = ranks.script(**TWO_NODES, ctrl_port=port)
    nodes = [ranks.start(script, UNIDIST_OPTIONS=json.dumps({"node_rank": node})) for node in range(2)]
    (code, output), (other_code, other) = outcome(*nodes)
    assert code == other_code == 0, (output, other)
    assert output.splitlines()[-1] == "ranks [0, 1]"


def test_a_rank_that_cannot_import_oneflow(ranks, port):
    """The others wait for it inside OneFlow by then, where no thread of Python's runs."""
    script = ranks.script()
    script.write_text(
        "import os, sys\nif os.environ['RANK'] == '1': sys.modules['google'] = None\n" + script.read_text()
    )
    (code, output), (other_code, other) = outcome(*ranks.start_all(script, script, port=port))
    assert code == -signal.SIGKILL
    assert "PeerFailed" in output
    assert "rank 1 on " in output
    assert "oneflow cannot be imported" in output
    assert other_code == 1
    assert "unidist setup oneflow" in other


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


LATE = """
import os, sys, time

class Late:
    def find_spec(self, name, *_):
        if name == "oneflow.framework.env_util":
            time.sleep(999)

if os.environ["RANK"] == "1":
    sys.meta_path.insert(0, Late())
"""


def test_a_start_that_takes_too_long(ranks, port):
    """Rank 0 waits inside of OneFlow, where no thread of Python's runs; rank 1 does not come."""
    script = ranks.script(timeout=10)
    script.write_text(LATE + script.read_text())
    for code, output in outcome(*ranks.start_all(script, script, port=port)):
        assert code == -signal.SIGKILL, output
        assert "OneFlow has not started within 15 s, though all ranks have met" in output


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


def test_declaration_imports_no_framework():
    code = "import sys; import unidist_oneflow.backend; print('oneflow' in sys.modules)"
    env = {**os.environ, **interpreter_for("oneflow")[1]}
    said = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=PATIENCE)
    assert said.stdout.strip() == "False", said.stderr


def test_noise_is_shown_when_the_import_fails(capfd):
    def fail():
        with start.quiet():
            os.write(2, b"what the library said\n")
            raise ImportError("no")

    with pytest.raises(ImportError):
        fail()
    assert "what the library said" in capfd.readouterr().err


def test_command_line_spells_options_as_oneflow_does(tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    command = [sys.executable, "-m", "unidist", "run", "--backend", "oneflow", "--machine", "10.0.0.1,10.0.0.2"]
    command += ["--ctrl-port", "9988", "--node-rank=1", "--view=consistent", "--dry-run=json", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    [worker] = json.loads(done.stdout)
    assert worker["env"]["MASTER_PORT"] == "9988"
    assert worker["env"]["RANK"] == "1"
    assert json.loads(worker["env"]["UNIDIST_OPTIONS"])["view"] == "consistent"

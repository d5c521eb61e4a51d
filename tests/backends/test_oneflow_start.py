"""What makes OneFlow "wait for ever" is named at the start, and whoever is left behind ends too: on real processes."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

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
        env |= {**self._env, "OMP_NUM_THREADS": "1", **{name: str(value) for name, value in variables.items()}}
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


def stranger(port: int, process: subprocess.Popen[str]) -> None:
    """Somebody who speaks JSON comes to the port as soon as the process listens there."""
    while process.poll() is None:
        try:
            with socket.create_connection(("127.0.0.1", port), 1.0) as connection:
                connection.sendall(b'{"jsonrpc": "2.0"}\n')
                assert connection.recv(1) == b""
                return
        except ConnectionRefusedError:
            time.sleep(0.05)


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


def test_taken_port(ranks, port):
    script = ranks.script(timeout=5)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        first, _ = ranks.start_all(script, script, port=port)
        code, output = outcome(first)[0]
    assert code != 0
    assert f"cannot listen on 127.0.0.1:{port}" in output
    assert f"process {os.getpid()} has it" in output
    assert "ctrl_port" in output


def test_differing_scripts(ranks, port):
    one, other = ranks.script("a/train.py"), ranks.script("b/train.py", comment="# another version\n")
    for code, output in outcome(*ranks.start_all(one, other, port=port)):
        assert code != 0
        assert "the script differs between nodes" in output


def test_differing_machine_lists(ranks, port):
    here = {"ctrl_port": port, "timeout": 20}
    one = ranks.start(ranks.script("a/train.py", machine="127.0.0.1,127.0.0.2", node_rank=0, **here))
    other = ranks.start(ranks.script("b/train.py", machine="127.0.0.2,127.0.0.1", node_rank=0, **here))
    for code, output in outcome(one, other):
        assert code != 0
        assert "the list of machines differs between nodes" in output


def test_missing_node(ranks, port):
    script = ranks.script(machine="127.0.0.1,127.0.0.2", node_rank=0, ctrl_port=port, timeout=7)
    process = ranks.start(script)
    stranger(port, process)
    [(code, output)] = outcome(process)
    assert code != 0
    assert "waits on 127.0.0.1" in output  # said after a few seconds ...
    assert "rank 1 (127.0.0.2) did not come" in output  # ... and at the end


def test_unreachable_master(ranks, port):
    script = ranks.script(machine="127.0.0.1,127.0.0.2", node_rank=1, ctrl_port=port, timeout=2)
    [(code, output)] = outcome(ranks.start(script))
    assert code != 0
    assert f"cannot reach the master at 127.0.0.1:{port}" in output
    assert "nothing listens there" in output


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


@pytest.mark.parametrize(
    ("last", "code", "said"),
    [
        ("raise KeyError('the last rank is wrong')", 1, "the last rank is wrong"),
        ("sys.exit(7)", 7, "exit code 7"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, "it died"),
    ],
)
def test_whoever_is_left_ends_with_the_cause(ranks, port, last, code, said):
    """Without a launcher of ours. OneFlow would hang, or abort with a C++ stack."""
    script = ranks.script(steps=10**9, last=last)
    *survivors, (last_code, _) = outcome(*ranks.start_all(script, script, script, port=port))
    assert last_code == code
    for survivor_code, output in survivors:
        assert survivor_code == 1, output
        assert "PeerFailed" in output
        assert "rank 2 on " in output
        assert said in output


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

"""What makes OneFlow "wait for ever" is named at the start: on real processes."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from oneflow_support import PATIENCE, outcome

import bad_starts
from unidist.launch.environments import interpreter_for
from unidist_oneflow import start

pytest_plugins = ["oneflow_support"]


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

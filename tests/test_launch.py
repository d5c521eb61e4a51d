"""`unidist run`: what its processes get, what is refused before anything starts, and the plan, shown."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys

import pytest

from launch_support import PATIENCE, ROLES, RUN, Place

# -- what a process gets -------------------------------------------------------------------------------------------


def test_each_process_knows_its_place(place: Place) -> None:
    script = place.script("import json; print(json.dumps({'argv': sys.argv[1:], **os.environ}))")
    foreign = {
        "TORCHELASTIC_RUN_ID": "x",
        "RANK": "7",
        "HOROVOD_RANK": "3",
        "DMLC_ROLE": "server",
        "NCCL_DEBUG": "INFO",
    }
    ended = place.run(*RUN, "--nproc", "3", "--option", "depth=2", script, "--", "--epochs", "3", "-q", **foreign)
    assert ended.code == 0, ended.err
    shown = {m[1]: json.loads(m[2]) for m in re.finditer(r"^\[(worker \d)\] (.*)$", ended.out, re.M)}
    assert sorted(shown) == ["worker 0", "worker 1", "worker 2"]
    for rank, env in enumerate(shown[name] for name in sorted(shown)):
        assert env["argv"] == ["--", "--epochs", "3", "-q"]
        expected = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "3", "ROLE": "worker", "BACKEND": "plain"}
        assert {name: env[f"UNIDIST_{name}"] for name in expected} == expected
        assert (env["RANK"], env["WORLD_SIZE"]) == (str(rank), "3")
        assert json.loads(env["UNIDIST_OPTIONS"]) == {"depth": 2}
        assert env["MASTER_PORT"] == shown["worker 0"]["MASTER_PORT"]
        assert env["UNIDIST_CONTROL"].startswith("tcp://127.0.0.1:")
        assert int(env["OMP_NUM_THREADS"]) >= 1
        assert env["NCCL_DEBUG"] == "INFO"
        assert not {"TORCHELASTIC_RUN_ID", "HOROVOD_RANK", "DMLC_ROLE"} & set(env)
    assert "OMP_NUM_THREADS=" in ended.err


def test_a_users_omp_num_threads_stays(place: Place) -> None:
    ended = place.run(*RUN, place.script("print(os.environ['OMP_NUM_THREADS'])"), OMP_NUM_THREADS="5")
    assert ended.out == "[worker 0] 5\n"
    assert "OMP" not in ended.err


def test_a_module_and_this_unidist(place: Place) -> None:
    place.script("import unidist; print('from', unidist.__version__)", "thing.py")
    ended = place.run(*RUN, "-n", "2", "-m", "thing", "x")
    assert ended.code == 0, ended.err
    assert ended.out.count("from ") == 2


def test_torchruns_spellings(place: Place) -> None:
    script = place.script("print(os.environ['MASTER_PORT'])")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ended = place.run(
        *RUN,
        "--standalone",
        "--nnodes=1",
        "--nproc_per_node=2",
        "--master_port",
        port,
        "--rdzv-id=1",
        "--tee=3",
        script,
    )
    assert ended.code == 0, ended.err
    assert ended.out.count(port) == 2
    assert "--rdzv-id, --tee not needed" in ended.err
    refused = place.run(*RUN, "--nnodes=2", script)
    assert refused.code == 2
    assert "one machine" in refused.err


def test_the_network_options(place: Place) -> None:
    script = place.script("print([os.environ.get(n) for n in ('NCCL_DEBUG', 'NCCL_IB_DISABLE', 'PLAIN_INTERFACE')])")
    ended = place.run(*RUN, "--nccl-debug", "INFO", "--nccl-ib-disable", "--interface", "lo", script)
    assert "['INFO', '1', 'lo']" in ended.out
    unknown = place.run("run", "--backend", "roles", "--interface", "lo", script)
    assert unknown.code == 2
    assert "backend 'roles' cannot be told" in unknown.err
    refused = place.run(*RUN, "--interface", "eth77", script)
    assert refused.code == 2
    assert "this machine has" in refused.err


# -- what is refused before anything starts ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--option", "dpeth=2"), "Did you mean 'depth'?"),
        (("--option", "depth=0"), "depth is 0"),
        (("--option", "depth"), "name=value"),
        (("--nproc", "0"), "--nproc 0"),
        (("--nproc", "two"), "--nproc two"),
        (("--servers", "1"), "no servers"),
        (("--max-restarts", "-1"), "'-1' is not"),
        (("--timeout", "0"), "'0' is not"),
    ],
)
def test_wrong_arguments_start_nothing(place: Place, arguments: tuple[str, ...], says: str) -> None:
    ended = place.run(*RUN, *arguments, place.script(""))
    assert ended.code in (1, 2)
    assert says in ended.err
    assert "Traceback" not in ended.err
    assert place.pids() == []


def test_unknown_backend_and_missing_framework(place: Place) -> None:
    script = place.script("")
    assert "Did you mean 'plain'?" in place.run("run", "--backend", "plian", script).err
    ended = place.run("run", "--backend", "absent", script)
    assert (ended.code, "no_such_framework" in ended.err) == (1, True)
    assert place.pids() == []


def test_a_missing_script_is_said_once(place: Place) -> None:
    ended = place.run(*RUN, "-n", "3", "nowhere.py")
    assert ended.code == 2
    assert ended.err.count("nowhere.py") == 1


def test_a_script_that_fails_at_import_is_shown_once(place: Place) -> None:
    ended = place.run(*RUN, "-n", "3", place.script("\nthis is no python\n"))
    assert ended.code == 1
    assert len(re.findall(r'^\[worker \d\]   File "', ended.err, re.M)) == 1
    summary = "\n".join(ended.summary)
    assert "exit code 1" in summary
    assert "SyntaxError" in summary
    gone = place.run(*RUN, "-n", "3", "-m", "no_such_module")
    assert gone.code == 1
    assert len(re.findall(r"^\[worker \d\] .*python.*: No module named", gone.err, re.M)) == 1


# -- the plan, shown -----------------------------------------------------------------------------------------------


def test_dry_run(place: Place) -> None:
    ended = place.run(*ROLES, "--dry-run=json", place.script(""), "x")
    processes = json.loads(ended.out)
    assert [(p["role"], p["rank"]) for p in processes] == [
        ("scheduler", 0),
        ("server", 0),
        ("server", 1),
        ("worker", 0),
        ("worker", 1),
    ]
    assert all(p["command"][-1] == "x" and p["host"] == "127.0.0.1" for p in processes)
    assert processes[0]["env"]["ROOT_PORT"] == processes[-1]["env"]["MASTER_PORT"]
    assert "UNIDIST_TOKEN" not in ended.out
    table = place.run(*ROLES, "--dry-run", place.script(""))
    assert re.search(r"^server 1 +127.0.0.1 +\S*python\S* .*script.py$", table.out, re.M)
    assert place.pids() == []


def test_the_launcher_imports_no_framework_and_no_numpy(place: Place) -> None:
    code = (
        "import sys; from unidist.cli import main; main(['run', '-b', 'plain', '--dry-run', sys.argv[1]]);"
        "bad = {'numpy', 'torch', 'mxnet', 'oneflow', 'horovod'} & set(sys.modules); sys.exit(str(bad) if bad else 0)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, place.script("")], env=place.env, capture_output=True, text=True, timeout=PATIENCE
    )
    assert ended.returncode == 0, ended.stderr

"""Around the training of the MXNet backend: processes started by hand, what becomes of the rest when one of them
dies, and the example."""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mxnet_shells import SCRIPT, four_shells, outputs, until_trained

from example_runs import OF_TORCH
from project import ROOT
from unidist.launch.environments import interpreter_for
from unidist.launch.ports import Ports

TOO_SMALL = SCRIPT.replace("unidist.Strategy()", "unidist.Strategy(update_on='server', server_memory=1e-6)")
SMALL = TOO_SMALL.replace("1e-6)", "1e-6, server_memory_check='warn')")


@pytest.mark.parametrize(("way", "script"), [("by hand", SCRIPT), ("launch.py", SCRIPT), ("MXJob", SMALL)])
def test_same_script_in_four_shells(tmp_path, way, script):
    # Where ps-lite numbers the workers, their checks in debug mode must wait for those numbers.
    with four_shells(tmp_path, way=way, script=script, UNIDIST_DEBUG=str(int(way == "by hand"))) as started:
        codes = {name: process.wait(120) for name, process in started.items()}
    said = outputs(tmp_path, codes)
    assert set(codes.values()) == {0}, said
    services = (said["scheduler"] + said["server"]).splitlines()
    assert all(" for the others" in line for line in services), said  # they never saw the training code
    workers = said["worker a"] + said["worker b"]
    assert "trained [0, 1] 0 2\n" in workers
    assert workers.count("trained") == 1
    if way != "by hand":  # else ps-lite numbers them as they come
        assert "trained" in said["worker b"]
    # The servers tell what they may use, which is a kilobyte; the model has 92 numbers of 4 bytes, and with gradients
    # and the two moments of an optimizer four times that.
    assert workers.count("the servers have 1.0 KB of memory on 1 host, and need 1.4 KB") == (script is SMALL), workers


@pytest.mark.parametrize("way", ["by hand", "MXJob"])
def test_a_model_that_does_not_fit_is_refused_on_every_rank(tmp_path, way):
    with four_shells(tmp_path, way=way, script=TOO_SMALL) as started:
        codes = {name: process.wait(120) for name, process in started.items()}
    said = outputs(tmp_path, codes)
    for name in ("worker a", "worker b"):
        assert codes[name] == 1, said
        assert "UsageError: the servers have 1.0 KB of memory on 1 host, and need 1.4 KB" in said[name], said
        assert "server_memory_check='warn'" in said[name]
    assert "trained [" not in str(said)


EARLY = "import mxnet\n" + SCRIPT


def test_mxnet_imported_too_early(tmp_path):
    """Scheduler and server never get as far as unidist. Training works and ends, but who watches over it?"""
    with four_shells(tmp_path, script=EARLY) as started:
        codes = {name: process.wait(120) for name, process in started.items()}
    said = outputs(tmp_path, codes)
    assert set(codes.values()) == {0}, said
    workers = said["worker a"] + said["worker b"]
    assert "trained [0, 1] 0 2\n" in workers
    assert workers.count("import it after unidist.Strategy()") == 1


def test_mxnet_imported_too_early_for_updates_on_servers(tmp_path):
    script = EARLY.replace("unidist.Strategy()", "unidist.Strategy(update_on='server')")
    with four_shells(tmp_path, script=script) as started:
        codes = {name: started[name].wait(120) for name in ("worker a", "worker b")}
    said = outputs(tmp_path, codes)
    assert set(codes.values()) == {1}, said
    assert all("UsageError" in each and "unidist_mxnet.services" in each for each in said.values()), said


def test_scheduler_and_server_started_without_the_script(tmp_path):
    script = EARLY.replace("unidist.Strategy()", "unidist.Strategy(update_on='server')")
    with four_shells(tmp_path, script=script, services=["-m", "unidist_mxnet.services"]) as started:
        codes = {name: process.wait(120) for name, process in started.items()}
    said = outputs(tmp_path, codes)
    assert set(codes.values()) == {0}, said
    assert "trained [0, 1] 0 2\n" in said["worker a"] + said["worker b"]


@pytest.mark.parametrize("victim", ["scheduler", "server", "worker b"])
def test_death_ends_a_job_started_by_hand(tmp_path, victim):
    """ps-lite alone would wait for ever."""
    with four_shells(tmp_path, "for ever") as started:
        until_trained(tmp_path, started)
        started[victim].kill()
        codes = {name: process.wait(90) for name, process in started.items()}
    said = outputs(tmp_path, codes)
    assert codes.pop(victim) == -9
    assert set(codes.values()) == {1}, said
    cause = {"scheduler": "the scheduler", "server": "server 0", "worker b": r"rank \d"}[victim]
    for name in codes:
        lines = [line for line in said[name].splitlines() if "PeerFailed" in line]
        assert len(lines) == 1, said
        assert re.match(f"unidist: PeerFailed: {cause} on .*ended in mid-training", lines[0]), said


@pytest.mark.parametrize("victim", ["scheduler", "server"])
def test_death_ends_a_job_of_unidist_run(tmp_path, victim):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "unidist", "run", "--backend=mxnet", "--nproc=2", "--servers=1"]
    launcher = subprocess.Popen(
        [*command, str(tmp_path / "train.py"), "for ever"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said = ""
        while "trained" not in said:
            line = launcher.stdout.readline()
            assert line, said
            said += line
        subprocess.run(["kill", "-9", str(_of_role(launcher.pid, victim))], check=True)
        rest, _ = launcher.communicate(timeout=90)
    finally:
        launcher.kill()
        launcher.wait()
    assert launcher.returncode == 137, rest
    assert f"{victim}" in next(line for line in rest.splitlines() if "failed first" in line)


def _of_role(launcher, role):
    """The process of this job with that DMLC_ROLE."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if f"DMLC_ROLE={role}".encode() in variables and _descends(int(pid), launcher):
                return int(pid)
    raise AssertionError(f"no {role} below process {launcher}")


def _descends(pid, ancestor):
    while pid > 1:
        if pid == ancestor:
            return True
        pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    return False


def test_worker_that_meets_nobody_says_so(tmp_path):
    python, variables = interpreter_for("mxnet")
    env = {"DMLC_ROLE": "worker", "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_NUM_SERVER": "1", "DMLC_NUM_WORKER": "1"}
    with Ports() as ports:
        env["DMLC_PS_ROOT_PORT"] = str(ports.take(1)[0])
        done = subprocess.run(
            [python, "-c", "import unidist; unidist.Strategy(timeout=3)"],
            env={**os.environ, **variables, **env},
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 1
    assert f"ports {int(env['DMLC_PS_ROOT_PORT']) + 1} to" in done.stderr
    assert "was the scheduler started" in done.stderr


def test_distributed_store_without_a_cluster_is_refused(tmp_path):
    python, variables = interpreter_for("mxnet")
    done = subprocess.run(
        [python, "-c", "import unidist; unidist.Strategy('mxnet', kvstore='dist_sync')"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "unidist run --backend mxnet" in done.stderr


def test_options_that_the_servers_were_not_told_are_refused(tmp_path):
    (tmp_path / "train.py").write_text(
        "import unidist\n"
        "try:\n"
        "    unidist.Strategy(bigarray_bound=20)\n"
        "except unidist.errors.UsageError as error:\n"
        "    print(error)\n"
        "unidist.Strategy(server_memory=1.5)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "unidist", "run", "--backend=mxnet", "--servers=1", str(tmp_path / "train.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "--option bigarray_bound=20" in done.stdout
    assert "--option server_memory=1.5" in done.stderr


def example(kvstore, *arguments):
    """What examples/train.py printed on two workers and a server."""
    launcher = [sys.executable, "-m", "unidist", "run", "--backend=mxnet", "--nproc=2", "--servers=1"]
    done = subprocess.run(
        [*launcher, f"--option=kvstore={kvstore}", str(ROOT / "examples" / "train.py"), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("kvstore", ["dist_sync", "dist_device_sync"])
def test_the_example_learns_what_torch_learns(kvstore):
    """The same initial weights, the same samples, the same losses to 1e-4."""
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", example(kvstore, "--epochs=5"))]
    assert losses == pytest.approx(OF_TORCH, abs=1e-4)


def test_the_example_learns_as_well_in_dist_async():
    """Every run takes another path. The synchronous modes reach 0.9583."""
    accuracies = [float(accuracy) for accuracy in re.findall(r"accuracy (\S+)", example("dist_async"))]
    assert len(accuracies) == 12
    assert accuracies[-1] > 0.93

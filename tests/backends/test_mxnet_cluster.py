"""Around the training of the MXNet backend: the plan of a job, processes started by hand, and what becomes of the rest
when one of them dies."""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mxnet_shells import SCRIPT, four_shells, outputs, until_trained

from unidist import World, registry
from unidist.errors import UsageError
from unidist.launch.environments import interpreter_for
from unidist.launch.plan import Job, plan, totals
from unidist.launch.ports import Ports
from unidist_mxnet import MxnetOptions, capabilities
from unidist_mxnet.devices import pick_contexts
from unidist_mxnet.memory import granted_too_much, of_this_process, too_little

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
GB = 2**30


# -- options and plan ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kvstore": "dist_snyc"}, "dist_sync"),  # MXNet itself would take it for dist_sync
        ({"update_on": "both"}, "worker"),
        ({"kvstore": "dist_async", "update_on": "worker"}, "dist_async"),
        ({"kvstore": "local", "update_on": "server"}, "no servers"),
        ({"kvstore": "device", "compression": "2bit"}, "network"),
        ({"compression": "1bit"}, "2bit"),
        ({"compression_threshold": 0}, "above 0"),
        ({"devices": 0}, "from 1"),
        ({"devices": []}, "devices"),
        ({"servers": -1}, "from 0"),
        ({"bigarray_bound": 0.5}, "whole number"),
    ],
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(UsageError, match=words):
        MxnetOptions(**options)


def job(nproc=2, servers=0, **options):
    return Job("mxnet", "python", ("python", "train.py"), nproc, servers, options, ports=tuple(range(9000, 9012)))


def planned(*arguments, **options):
    return plan(job(*arguments, **options), registry.plugin("mxnet"))


def test_plan_has_scheduler_servers_and_workers():
    processes = planned(3, 2)
    assert [each.name for each in processes] == [
        "scheduler",
        "server 0",
        "server 1",
        "worker 0",
        "worker 1",
        "worker 2",
    ]
    for each in processes:
        assert each.env["DMLC_ROLE"] == each.role
        assert (each.env["DMLC_NUM_WORKER"], each.env["DMLC_NUM_SERVER"]) == ("3", "2")
        assert each.env["DMLC_PS_ROOT_PORT"] == "9000"
        # The user's script is for workers alone.
        assert ("train.py" in each.command) == (each.role == "worker")
    ports = [int(each.env["PORT"]) for each in processes if each.role == "worker"]
    assert ports == sorted(set(ports))  # ps-lite numbers the workers in this order
    assert 9000 not in ports


def test_one_worker_needs_no_servers():
    assert [each.name for each in planned(1)] == ["worker 0"]
    assert "DMLC_ROLE" not in planned(1)[0].env
    assert len(planned(1, 1)) == 3
    assert len(planned(1, kvstore="dist_sync")) == 3
    assert len(planned(1, update_on="server")) == 3
    assert len(planned(2)) == 4  # one server unless told


def test_servers_may_be_asked_for_as_an_option():
    processes = plan(
        Job("mxnet", "python", ("python", "x"), 1, 0, {"servers": 2}, ports=(9000, 9001)), registry.plugin("mxnet")
    )
    assert len(processes) == 4
    with pytest.raises(UsageError, match="contradict"):
        plan(Job("mxnet", "python", ("python", "x"), 1, 1, {"servers": 2}), registry.plugin("mxnet"))


@pytest.mark.parametrize(("nproc", "servers"), [(2, 0), (1, 1)])
def test_local_store_is_for_one_worker_without_servers(nproc, servers):
    with pytest.raises(UsageError, match="dist_sync"):
        planned(nproc, servers, kvstore="local")


def test_resources_add_up():
    """2 cores x 1 server + 12 cores x 2 workers = 26 CPU, 2 x 2 = 4 GPU."""
    processes = planned(2, 1, server_cores=2, worker_cores=12, devices=["gpu(0)", "gpu(1)"])
    assert totals(processes) == "2 x 1 + 12 x 2 = 26 CPU, 2 x 2 = 4 GPU"
    by_name = {each.name: each.env.get("OMP_NUM_THREADS") for each in processes}
    assert (by_name["server 0"], by_name["worker 1"]) == ("2", "12")


def test_a_number_of_devices_is_counted_as_what_it_will_be(monkeypatch):
    """GPUs where there are any, as pick_contexts has it."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert totals(planned(2, 1, server_cores=2, worker_cores=12, devices=2)) == (
        "2 x 1 + 12 x 2 = 26 CPU, 2 x 2 = 4 GPU"
    )
    assert totals(planned(2, 1)) == "1 x 2 = 2 GPU"
    assert totals(planned(2, 1, devices=["cpu(0)", "gpu(0)"])) == "1 x 2 = 2 GPU, 1 x 2 = 2 devices on the CPU"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert totals(planned(2, 1, devices=2)) == "2 x 2 = 4 devices on the CPU"
    assert totals(planned(2, 1)) == ""


def test_dry_run_shows_the_totals(tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    options = ["server_cores=2", "worker_cores=12", 'devices=["gpu(0)","gpu(1)"]']
    command = [sys.executable, "-m", "unidist", "run", "--backend=mxnet", "--nproc=2", "--servers=1", "--dry-run"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, *(f"--option={each}" for each in options), str(script)], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "2 x 1 + 12 x 2 = 26 CPU, 2 x 2 = 4 GPU" in done.stdout


def test_capabilities_say_what_the_mode_cannot_do():
    assert capabilities(MxnetOptions(kvstore="dist_sync")).synchronous is True
    declared = capabilities(MxnetOptions(kvstore="dist_async"))
    for name in ("synchronous", "lockstep"):
        assert "dist_sync" in getattr(declared, name)
    alone = capabilities(MxnetOptions(kvstore="dist_async"), workers=1)
    assert (alone.synchronous, alone.lockstep) == (True, True)
    assert "update_on='worker'" in declared.clip_norm
    assert "train_step" in capabilities(MxnetOptions(devices=2)).spelled_out


# -- devices and memory ----------------------------------------------------------------------------------------


def test_contexts():
    first, second = World(0, 2, 0, 2), World(1, 2, 1, 2)
    assert pick_contexts(None, 1, 0, second) == [("cpu", 0)]
    assert pick_contexts(None, 2, 0, second) == [("cpu", 0), ("cpu", 1)]
    assert pick_contexts(None, 2, 4, second) == [("gpu", 2), ("gpu", 3)]
    assert pick_contexts("cpu", 1, 4, first) == [("cpu", 0)]
    assert pick_contexts("cuda:1", 1, 4, first) == [("gpu", 1)]
    assert pick_contexts(None, ["gpu(3)", "gpu(1)"], 4, first) == [("gpu", 3), ("gpu", 1)]
    for asked, devices, gpus, words in [
        ("gpu", 1, 0, "no GPU"),
        (None, 2, 3, "GPU 3"),
        ("tpu", 1, 0, "tpu"),
        ("cpu", ["cpu(0)"], 0, "keep one"),
        (None, ["cpu(0)", "cpu(0)"], 0, "twice"),
    ]:
        with pytest.raises(UsageError, match=words):
            pick_contexts(asked, devices, gpus, second)


def test_servers_that_are_too_small_are_noticed():
    small = [{"host": "a", "bytes": 3 * GB}, {"host": "a", "bytes": 3 * GB}, {"host": "b", "bytes": 3 * GB}]
    assert too_little(GB, 4, small) is None
    assert too_little(2 * GB, 4, []) is None  # nobody told
    said = too_little(2 * GB, 4, small)
    assert "6.0 GB of memory on 2 hosts" in said
    assert "8.0 GB" in said
    granted = [{**each, "granted": True} for each in small]
    assert too_little(2 * GB, 4, granted) is None  # 9 GB: each has its own


def test_more_than_the_machine_has_cannot_be_granted():
    """Known before anything starts, so --dry-run says it too."""
    assert granted_too_much(2, 1.5, 3 * GB, "h1") is None
    assert "1.5 GB to each of 3 servers, and h1 has 4.0 GB" in granted_too_much(3, 1.5, 4 * GB, "h1")
    enough = of_this_process() / GB
    assert len(planned(1, 2, server_memory=enough / 2)) == 4
    with pytest.raises(UsageError, match=r"each of 2 servers, and this machine has .*server_memory_check='warn'"):
        planned(1, 2, server_memory=enough * 0.6)
    assert len(planned(1, 2, server_memory=enough * 0.6, server_memory_check="warn")) == 4


def test_memory_of_a_process_is_what_its_control_groups_leave():
    total = int(Path("/proc/meminfo").read_text().split("MemTotal:")[1].split()[0]) * 1024
    assert 0 < of_this_process() <= total


# -- processes -------------------------------------------------------------------------------------------------

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
    """The same initial weights, the same samples, the same losses to 1e-4: those of torch, written down here."""
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", example(kvstore, "--epochs=5"))]
    assert losses == pytest.approx([2.207328, 1.045128, 0.490391, 0.332328, 0.267501], abs=1e-4)


def test_the_example_learns_as_well_in_dist_async():
    """Every run takes another path. The synchronous modes reach 0.9583."""
    accuracies = [float(accuracy) for accuracy in re.findall(r"accuracy (\S+)", example("dist_async"))]
    assert len(accuracies) == 12
    assert accuracies[-1] > 0.93

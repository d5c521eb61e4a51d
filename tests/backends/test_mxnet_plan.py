"""What is known of an MXNet job before it starts: its options, its plan, its devices and its memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from project import ROOT
from unidist import World, registry
from unidist.errors import UsageError
from unidist.launch.plan import Job, plan, totals
from unidist_mxnet import MxnetOptions, capabilities
from unidist_mxnet.devices import pick_contexts
from unidist_mxnet.memory import granted_too_much, of_this_process, too_little

GB = 2**30


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

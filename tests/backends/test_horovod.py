"""Horovod keeps every promise at world sizes 1, 2 and 3, for torch and for MXNet models; below, what only it has."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_torch import TORCH_MODELS, TORCH_STATES

from project import ROOT, free_port
from unidist import registry
from unidist.errors import BackendUnavailable, UsageError
from unidist.launch.environments import interpreter_for
from unidist.testing import Configuration, conformance, run
from unidist.testing.suite import report, resume
from unidist.world import World
from unidist_horovod import HorovodOptions
from unidist_horovod.backend import built_for, choose
from unidist_horovod.meeting import Meeting

TORCH, MXNET = "unidist_torch.zoo", "unidist_mxnet.zoo"

test_promises_on_torch = conformance("horovod", zoo=TORCH, world_sizes=(2,), framework="torch")
test_promises_on_torch_of_1_and_3 = conformance(
    "horovod", zoo=TORCH, world_sizes=(1, 3), one_launch=True, framework="torch"
)
test_promises_on_mxnet = conformance("horovod", zoo=MXNET, world_sizes=(2,), framework="mxnet")
test_promises_on_mxnet_of_1_and_3 = conformance(
    "horovod", zoo=MXNET, world_sizes=(1, 3), one_launch=True, framework="mxnet"
)


def test_resumes_on_another_number_of_ranks():
    resume(Configuration("horovod", TORCH, 3, (("framework", "torch"),)), 2)


GLUON = (
    "deferred_initialisation",
    "deferred_initialisation_spelled_out",
    "native_optimizers",
    "trainer_is_ours_after_prepare",
    "rate_set_by_hand",
    "gradient_of_a_parameter_that_was_not_used",
    "gradients_of_one_layer_cleared_in_a_group",
    "uneven_batches_with_every_kind_of_update",
    "native_optimizer_and_uneven_batches",
    "gradients_made_anew_between_steps",
    "backward_before_prepare_of_a_static_graph",
    "values_set_between_steps",
    "wait_for_the_queue_that_is_interrupted",
    "arrays_made_anew_while_gradients_travel",
    "trainers_after_the_end",
    "weights_of_very_different_size",
    "backward_of_ones_own_with_one_model",
    "backward_of_ones_own_through_a_layer_that_the_loss_leaves_out",
    "flush_after_a_backward_of_ones_own",
    "gradients_clipped_by_hand",
    "gradients_that_are_looked_at",
    "gradients_kept_while_another_model_is_trained",
    "parameters_of_two_models",
    "parameters_of_float16_are_loaded",
    "parameters_of_float16_are_averaged",
    "values_loaded_into_a_prepared_model",
    "large_collectives",
    "ranks_that_disagree_over_horovod",
    "collectives_in_pieces_over_horovod",
    "convolutions_whose_shapes_come_late",
    "trainers_of_ones_own_are_refused",
    "frozen_for_a_while",
    "steps_that_nobody_waits_for_are_not_queued",
    "one_row_for_batch_normalisation",
)


OWN = (
    "parameters_that_no_rank_used",
    "parameters_that_one_rank_used",
    "gradients_that_no_rank_has",
    "buffers_outside_the_state",
    "layers_thawed_and_frozen_later",
    "parameters_of_two_dtypes",
    "bfloat16_averaged_by_hand",
    "parameters_without_elements",
    "ranks_that_disagree",
    "collectives_in_pieces",
    "dtypes_that_nothing_adds_up",
)


@pytest.mark.parametrize("name", GLUON)
def test_what_only_gluon_has(name):
    further_check("mxnet", "mxnet_checks", GLUON, name)


@pytest.mark.parametrize("name", OWN)
def test_torch_beyond_the_promises(name):
    further_check("torch", "horovod_checks", OWN, name)


@pytest.mark.parametrize("name", TORCH_MODELS)
def test_torch_models_beyond_the_promises(name):
    further_check("torch", "torch_checks", TORCH_MODELS, name)


@pytest.mark.parametrize("name", TORCH_STATES)
def test_what_torch_keeps(name):
    further_check("torch", "torch_state_checks", TORCH_STATES, name)


def further_check(framework, zoo, names, name):
    path = os.pathsep.join([str(Path(__file__).parent), str(ROOT)])
    options = (("framework", framework),)
    report(run(Configuration("horovod", zoo, 2, options, environment=(("PYTHONPATH", path),)), names)[name])


# -- started in every way ------------------------------------------------------------------------------------------

OF_TORCH = [2.207328, 1.045128, 0.490391, 0.332328, 0.267501]  # what examples/train.py prints on torch DDP, 5 epochs
TRAIN = [str(ROOT / "examples" / "train.py"), "--epochs=5"]


def environment() -> tuple[str, dict[str, str]]:
    python, variables = interpreter_for("horovod")
    path = os.pathsep.join([str(Path(python).parent), os.environ["PATH"]])
    return python, {**os.environ, **variables, "OMP_NUM_THREADS": "1", "PATH": path}


def finish(*processes: subprocess.Popen) -> str:
    """What they printed, after a good end."""
    output = ""
    for process in processes:
        try:
            output += process.communicate(timeout=300)[0]
        except subprocess.TimeoutExpired:
            for each in processes:
                each.kill()
            pytest.fail(f"still running: {process.communicate()[0]}")
    assert not any(process.returncode for process in processes), output
    return output


def start(command: list[str], env: dict[str, str]) -> subprocess.Popen:
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, env=env, text=True, **pipes)


def curve(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"epoch \d+  loss (\S+)", output)]


@pytest.mark.parametrize(("framework", "tolerance"), [("torch", 1e-5), ("mxnet", 1e-4)])
def test_the_example_learns_what_torch_learns(framework, tolerance):
    options = ["--backend=horovod", "--nproc=2", f"--option=framework={framework}"]
    _, env = environment()
    output = finish(start([sys.executable, "-m", "unidist", "run", *options, *TRAIN], {**env, "PYTHONPATH": str(ROOT)}))
    assert curve(output) == pytest.approx(OF_TORCH, abs=tolerance)


def test_horovodrun():
    python, env = environment()
    output = finish(start([python, "-m", "horovod.runner.launch", "--gloo", "-np", "2", python, *TRAIN], env))
    assert curve(output) == pytest.approx(OF_TORCH, abs=1e-5)
    assert "from horovod (HOROVOD_RANK is set)" in output


def test_horovodrun_names_the_rank_that_failed():
    """Not the one that lost it."""
    python, env = environment()
    env |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "backends")]), "UNIDIST_BACKEND": "horovod"}
    launcher = [python, "-m", "horovod.runner.launch", "--gloo", "-np", "2"]
    job = start([*launcher, python, "-m", "unidist.testing.scenario", "raises"], env)
    output, _ = job.communicate(timeout=300)
    assert job.returncode == 1, output
    assert "[1]<stderr>:RuntimeError: the victim's own error" in output
    assert "Process name: 1\nExit code: 1" in output, output


def start_by_hand(arguments: list[str], env: dict[str, str]) -> list[subprocess.Popen]:
    """Ranks 1 and 0, with Horovod's variables and no launcher."""
    python, own = environment()
    common = {"SIZE": 2, "LOCAL_SIZE": 2, "CROSS_RANK": 0, "CROSS_SIZE": 1, "GLOO_RENDEZVOUS_ADDR": "127.0.0.1"}
    common["GLOO_RENDEZVOUS_PORT"] = free_port()
    ranks = []
    for rank in (1, 0):  # the other one is there first
        said = {f"HOROVOD_{name}": str(value) for name, value in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()}
        ranks.append(start([python, *arguments], {**own, **env, **said}))
    return ranks


def test_variables_set_by_hand():
    """No launcher keeps values for the ranks: they meet at the address all the same."""
    assert curve(finish(*start_by_hand(TRAIN, {}))) == pytest.approx(OF_TORCH, abs=1e-5)


@pytest.mark.parametrize("framework", ["torch", "mxnet"])
def test_a_rank_lost_while_leaving_is_said(framework, tmp_path):
    """No launcher ends the other one, which has come to its end already: it says why it cannot, and fails too."""
    script = (
        "import time, unidist\n"
        "with unidist.Strategy() as strategy:\n"
        "    strategy.barrier()\n"
        "    if strategy.rank == 1:\n"
        "        time.sleep(1)\n"
        "        raise RuntimeError('the culprit')\n"
    )
    (tmp_path / "script.py").write_text(script)
    env = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "backends")])}
    env |= {"UNIDIST_BACKEND": "horovod", "UNIDIST_OPTIONS": json.dumps({"framework": framework})}
    culprit, other = start_by_hand([str(tmp_path / "script.py")], env)
    said, lost = (each.communicate(timeout=300)[0] for each in (culprit, other))
    assert "RuntimeError: the culprit" in said
    assert re.search(r"PeerFailed: rank 1 on \S+: RuntimeError: the culprit; rank 0 on \S+ ends with it", lost), lost
    assert culprit.returncode == 1
    assert other.returncode != 0


def launch(tmp_path: Path, script: str, **options: object) -> subprocess.Popen:
    """Two processes of it by `unidist run`."""
    (tmp_path / "script.py").write_text(script)
    said = [f"--option={name}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "unidist", "run", "--backend=horovod", "--nproc=2", *said]
    return start([*command, str(tmp_path / "script.py")], {**environment()[1], "PYTHONPATH": str(ROOT)})


def test_timeline_and_fusion(tmp_path):
    """The timeline names the gradients of the model, and tells that they were joined. An optimizer that joins them by
    itself is refused."""
    script = (
        "import horovod.torch as hvd, numpy as np, torch, unidist\n"
        "with unidist.Strategy() as strategy:\n"
        "    net = torch.nn.Linear(4, 2)\n"
        "    model, optimizer = strategy.prepare(net, unidist.SGD(0.1))\n"
        "    step = strategy.train_step(model, optimizer, lambda m, x: m(x).mean())\n"
        "    [step(x) for x in strategy.loader(np.ones((16, 4), np.float32), per_device_batch=4)]\n"
        "    try:\n"
        "        strategy.prepare(net, hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1)))\n"
        "    except unidist.UnidistError as error:\n"
        "        print(error)\n"
    )
    timeline = tmp_path / "timeline.json"
    job = launch(tmp_path, script, framework="torch", timeline=timeline, fusion_threshold_mb=8, cycle_time_ms=2)
    assert finish(job).count("average gradients a second time") == 2
    text = timeline.read_text()
    names = {event["args"]["name"] for event in json.loads(text) if "name" in event.get("args", {})}
    assert any("gradients of model 1, weight to bias" in name for name in names), names
    assert "MEMCPY_IN_FUSION_BUFFER" in text


def test_gluon_script_that_leaves_its_strategy_open(tmp_path):
    """It ends with steps that are still queued, and they are made."""
    script = (
        "import mxnet as mx, unidist\n"
        "strategy = unidist.Strategy()\n"
        "net = mx.gluon.nn.Dense(1024, in_units=1024)\n"
        "net.initialize()\n"
        "model, optimizer = strategy.prepare(net, unidist.SGD(0.1))\n"
        "step = strategy.train_step(model, optimizer, lambda m, x: m(x).mean())\n"
        "[step(mx.nd.ones((8, 1024))) for _ in range(4)]\n"
    )
    assert "shut down" not in finish(launch(tmp_path, script, framework="mxnet"))


@pytest.mark.parametrize(("framework", "names"), [("torch", "gradients of model 1"), ("mxnet", "gradients ")])
def test_stall_is_told_with_ranks_and_names(framework, names, tmp_path):
    """Rank 1 is busy elsewhere while rank 0 waits for its gradients."""
    script = (
        "import time, unidist\n"
        f"from unidist_{framework} import zoo\n"
        "from unidist.testing.reference import data\n"
        "with unidist.Strategy() as strategy:\n"
        "    model, optimizer = strategy.prepare(zoo.mlp(), unidist.SGD(0.1))\n"
        "    step = strategy.train_step(model, optimizer, zoo.cross_entropy)\n"
        "    for number, (x, y) in enumerate(strategy.loader(data(32), per_device_batch=4)):\n"
        "        if strategy.rank == 1 and number == 2:\n"
        "            time.sleep(100)\n"
        "        strategy.mean(step(x, y))\n"
    )
    job = launch(tmp_path, script, framework=framework, stall_warning=1)
    waiting = next((line for line in job.stdout if names in line), None)
    job.terminate()
    rest, _ = job.communicate(timeout=60)
    assert waiting is not None, rest
    assert waiting.startswith("[worker 0] 1: ["), waiting  # rank 0 says that rank 1 is missing


# -- options and builds --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"framework": "tensorflow"}, "torch, mxnet"),
        ({"fusion_threshold_mb": -1}, "number from 0"),
        ({"fusion_threshold_mb": 1e6}, "1024 or less"),
        ({"cycle_time_ms": 0}, "never rest"),
        ({"cycle_time_ms": 1e6}, "at most 1000"),
        ({"cycle_time_ms": "fast"}, "'fast'"),
        ({"timeline": ""}, "path of a file"),
        ({"stall_warning": 0.5}, "whole seconds"),
        ({"stall_shutdown": 30}, "stall_warning is 60"),
        ({"stall_shutdown": 3, "stall_warning": 0}, "from 1 to stall_shutdown"),
        ({"timline": "x"}, "Did you mean 'timeline'"),
    ],
)
def test_options_that_cannot_be(options, words):
    with pytest.raises(UsageError, match=words):
        registry.build_options(registry.plugin("horovod"), options)


def test_stall_shutdown_goes_by_horovods_own_variables(monkeypatch):
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "10")
    assert HorovodOptions(stall_shutdown=30).variables() == {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "30"}
    with pytest.raises(UsageError, match="stall_warning is 10"):
        HorovodOptions(stall_shutdown=5)
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "soon")
    with pytest.raises(UsageError, match="HOROVOD_STALL_CHECK_TIME_SECONDS is 'soon'"):
        HorovodOptions(stall_shutdown=30)
    monkeypatch.setenv("HOROVOD_STALL_CHECK_DISABLE", "1")
    with pytest.raises(UsageError, match="stall_warning is 0"):
        HorovodOptions(stall_shutdown=30)


def test_folder_of_the_timeline_must_exist(tmp_path):
    """Horovod itself would go on without a timeline."""
    options = HorovodOptions(timeline=str(tmp_path / "missing" / "timeline.json"))
    build = SimpleNamespace(is_initialized=lambda: False)
    with pytest.raises(UsageError, match="folder does not exist"):
        Meeting(build, lambda: None, OSError, World(0, 1), options, 30.0)


def test_options_are_told_in_horovods_words():
    options = registry.build_options(
        registry.plugin("horovod"), {"fusion_threshold_mb": 0.5, "cycle_time_ms": 3.5, "stall_warning": 0}
    )
    assert options.variables() == {
        "HOROVOD_FUSION_THRESHOLD": "524288",
        "HOROVOD_CYCLE_TIME": "3.5",
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "1",
    }
    assert registry.build_options(registry.plugin("horovod"), {}).variables() == {}


def test_framework_of_a_build():
    assert choose(None, ["torch", "mxnet"]) == "torch"
    assert choose(None, ["mxnet"]) == "mxnet"
    assert choose("mxnet", ["torch", "mxnet"]) == "mxnet"
    with pytest.raises(BackendUnavailable, match=r"built for mxnet, not for torch.*unidist setup horovod"):
        choose("torch", ["mxnet"])
    with pytest.raises(BackendUnavailable, match=r"no native library.*unidist setup horovod"):
        choose(None, [])


def test_native_libraries_tell_what_a_build_is_for(tmp_path, monkeypatch):
    """The Python files alone, as an install without a compiler leaves them, are no Horovod."""
    for framework in ("torch", "mxnet"):
        (tmp_path / "horovod" / framework).mkdir(parents=True)
    (tmp_path / "horovod" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert built_for() == []
    (tmp_path / "horovod" / "mxnet" / "mpi_lib.cpython-311-x86_64-linux-gnu.so").touch()
    assert built_for() == ["mxnet"]


@pytest.mark.parametrize(("source", "controller"), [("openmpi", None), ("none", "gloo")])
def test_a_build_with_mpi_uses_it_under_mpirun_only(source, controller, monkeypatch):
    """Seen through what such a build is told: the suite has none, because it takes Open MPI's headers to make one."""
    monkeypatch.setitem(sys.modules, "horovod", SimpleNamespace(__version__="0.28.1"))
    monkeypatch.setenv("HOROVOD_GLOO_TIMEOUT_SECONDS", "77")  # what a user says wins
    told = {}
    build = SimpleNamespace(
        is_initialized=lambda: False,
        mpi_built=lambda: True,
        mpi_enabled=lambda: source == "openmpi",
        gloo_built=lambda: True,
        init=lambda: told.update(os.environ),
        rank=lambda: 0,
        size=lambda: 1,
    )
    Meeting(build, lambda: None, OSError, World(0, 1, source=source), HorovodOptions(cycle_time_ms=2), 30.0)
    assert (told.get("HOROVOD_CONTROLLER"), told.get("HOROVOD_CPU_OPERATIONS")) == (controller, controller)
    assert (told["HOROVOD_CYCLE_TIME"], told["HOROVOD_GLOO_TIMEOUT_SECONDS"]) == ("2", "77")
    assert "HOROVOD_CYCLE_TIME" not in os.environ

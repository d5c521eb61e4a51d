"""Horovod's options, what they become in its own words, and which build of it there is."""

import os
import sys
from types import SimpleNamespace

import pytest

from unidist import registry
from unidist.errors import BackendUnavailable, UsageError
from unidist.world import World
from unidist_horovod import HorovodOptions
from unidist_horovod.backend import built_for, choose
from unidist_horovod.meeting import Meeting


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

"""Names to backends: found by entry points, refused clearly."""

import os
import subprocess
import sys
from dataclasses import dataclass

import pytest

import unidist
from project import ROOT
from unidist import registry
from unidist.backend import Plugin
from unidist.checks import LONGEST_WAIT, check_seconds
from unidist.errors import BackendUnavailable, UnidistError, UnknownBackend, UnknownOption, UsageError, WorldError
from unidist.world import World
from unidist.world.launcher import Launcher


@pytest.fixture
def third_party(tmp_path, monkeypatch):
    """Installs backends as a third party's distribution would: a module, and an entry point in its metadata."""
    monkeypatch.setattr(registry, "_loaded", {})  # nothing public forgets a plug-in that was loaded
    monkeypatch.syspath_prepend(tmp_path)

    def install(**entries):
        info = tmp_path / "third_party-1.0.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n")
        rows = "\n".join(f"{name} = {value}" for name, value in entries.items())
        (info / "entry_points.txt").write_text(f"[unidist.backends]\n{rows}\n")

    (tmp_path / "fourth.py").write_text(
        "from dataclasses import dataclass\n"
        "from unidist import Plugin\n"
        "@dataclass(frozen=True)\n"
        "class Options:\n"
        "    speed: int = 1\n"
        "plugin = Plugin('fourth', 'fourth:Missing', Options, ('no_such_framework',))\n"
        "not_a_plugin = object()\n"
    )
    yield install
    sys.modules.pop("fourth", None)


def test_built_in_backends_are_known():
    assert "torch" in registry.names()
    assert registry.plugin("torch").requires == ("torch",)


def test_third_party_backend_is_found(third_party):
    third_party(fourth="fourth:plugin")
    assert "fourth" in registry.names()
    assert registry.plugin("fourth").name == "fourth"


def test_unknown_name_lists_all_and_suggests():
    with pytest.raises(UnknownBackend, match=r"'torhc'.*Did you mean 'torch'\?.*Known: .*torch"):
        registry.plugin("torhc")


def test_two_of_one_name_are_refused(third_party):
    third_party(torch="fourth:plugin")
    with pytest.raises(UnidistError, match=r"two backends are called 'torch': .*fourth:plugin"):
        registry.names()


def test_entry_point_to_something_else_is_refused(third_party):
    third_party(fourth="fourth:not_a_plugin")
    with pytest.raises(UnidistError, match="must name a unidist"):
        registry.plugin("fourth")


def test_broken_declarations_do_no_harm_to_the_others(third_party):
    third_party(fourth="fourth:not_a_plugin", fifth="fourth:plugin", sixth="no_such_module:plugin")
    assert {"torch", "mxnet"} <= {plugin.name for plugin in registry.loadable()}
    for broken in ("fourth", "fifth", "sixth"):
        with pytest.raises(UnidistError):
            registry.plugin(broken)


def test_missing_framework_gives_the_command_and_the_cause(third_party):
    third_party(fourth="fourth:plugin")
    with pytest.raises(BackendUnavailable, match="unidist setup fourth") as caught:
        registry.backend_class(registry.plugin("fourth"))
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    assert caught.value.__cause__.name == "no_such_framework"


def test_options_are_checked_by_name_and_value():
    torch = registry.plugin("torch")
    assert registry.build_options(torch, {"transport": "gloo"}).transport == "gloo"
    with pytest.raises(UnknownOption, match=r"'tranport'.*Did you mean 'transport'\?"):
        registry.build_options(torch, {"tranport": "gloo"})
    with pytest.raises(UsageError, match="transport is 'pigeon'"):
        registry.build_options(torch, {"transport": "pigeon"})


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), "10", None, True])
def test_a_timeout_is_a_number_of_seconds_above_0(timeout):
    with pytest.raises(UsageError, match=r"^timeout is .*, it must be a number above 0"):
        unidist.Strategy("torch", timeout=timeout)
    for name in ("torch", "mxnet"):
        with pytest.raises(UsageError, match=r"collective_timeout is .*, it must be a number above 0"):
            registry.build_options(registry.plugin(name), {"collective_timeout": timeout})


@pytest.mark.parametrize("timeout", [float("inf"), 1e300, 10**400])
def test_an_infinite_timeout_is_as_long_as_anything_can_wait(timeout):
    assert check_seconds("timeout", timeout) == LONGEST_WAIT
    for name in ("torch", "mxnet"):
        options = registry.build_options(registry.plugin(name), {"collective_timeout": timeout})
        assert options.collective_timeout == LONGEST_WAIT


def test_a_word_of_an_engine_that_is_no_backend_is_put_into_its_place():
    for word in ("gloo", "nccl", "mpi"):
        with pytest.raises(UnknownBackend, match=rf"Strategy\('torch', transport='{word}'\).*transport={word}`"):
            unidist.Strategy(word)
    with pytest.raises(UnknownBackend, match=r"Strategy\('mxnet', kvstore='dist_async'\)"):
        registry.plugin("dist_async")


def test_such_a_word_may_belong_to_a_backend_of_a_third_party(third_party, tmp_path):
    (tmp_path / "fifth.py").write_text(
        "from dataclasses import dataclass\nfrom typing import Literal\nfrom unidist import Plugin\n"
        "@dataclass(frozen=True)\nclass Options:\n    wire: Literal['copper', 'glass'] = 'copper'\n"
        "plugin = Plugin('fifth', '', Options, ())\n"
    )
    third_party(fifth="fifth:plugin")
    with pytest.raises(UnknownBackend, match=r"Strategy\('fifth', wire='glass'\)"):
        registry.plugin("glass")


@dataclass(frozen=True)
class NoOptions:
    pass


def launcher(marker):
    return Launcher("theirs", marker, lambda env: 1, (), "", lambda env: None, marker)


def choose(monkeypatch, name, env, installed):
    plugins = {
        "torch": Plugin("torch", "", NoOptions, ("t",)),
        "horovod": Plugin("horovod", "", NoOptions, ("h",), launcher=launcher("HOROVOD_RANK")),
        "mxnet": Plugin("mxnet", "", NoOptions, ("m",), launcher=launcher("DMLC_ROLE")),
    }
    monkeypatch.setattr(registry, "names", lambda: sorted(plugins))
    monkeypatch.setattr(registry, "plugin", plugins.__getitem__)
    monkeypatch.setattr(registry, "missing", lambda plugin: [] if plugin.name in installed else ["x"])
    chosen, why = registry.choose(name, env)
    return chosen.name, why


def test_choice_of_the_backend(monkeypatch):
    everything = {"torch", "mxnet", "horovod"}
    assert choose(monkeypatch, "mxnet", {"UNIDIST_BACKEND": "torch"}, set()) == ("mxnet", "named in the call")
    assert choose(monkeypatch, None, {"UNIDIST_BACKEND": "mxnet", "HOROVOD_RANK": "0"}, everything)[0] == "mxnet"
    assert choose(monkeypatch, None, {"HOROVOD_RANK": "0"}, everything) == ("horovod", "HOROVOD_RANK is set")
    assert choose(monkeypatch, None, {"DMLC_ROLE": "worker"}, everything) == ("mxnet", "DMLC_ROLE is set")
    assert choose(monkeypatch, None, {}, {"mxnet"}) == ("mxnet", "the only framework installed")
    assert choose(monkeypatch, None, {}, everything) == ("torch", "the default among horovod, mxnet, torch")
    with pytest.raises(UsageError, match="which backend"):
        choose(monkeypatch, None, {}, {"mxnet", "horovod"})
    with pytest.raises(UsageError, match="no framework is installed"):
        choose(monkeypatch, None, {}, set())


def test_a_bare_clone_reads_the_table_from_pyproject():
    """-S leaves out site-packages, and with it the metadata of anything that is installed."""
    code = "from unidist import registry; print(registry.plugin('torch').name, *registry.names())"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-S", "-c", code]
    said = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert said.stdout.split() == ["torch", "horovod", "mxnet", "oneflow", "torch"], said.stderr


def test_roles_other_than_worker_serve_and_never_train(third_party, monkeypatch, tmp_path):
    (tmp_path / "pantry.py").write_text(
        "served = []\ndef serve(world, options): served.append((world.role, options))\n"
    )
    world = World(0, 2, role="server", reason="DMLC_ROLE is server")
    with pytest.raises(SystemExit) as ended:
        registry.serve(Plugin("mine", "", NoOptions, (), serve="pantry:serve"), world, "options", 1.0)
    assert ended.value.code == 0
    assert sys.modules["pantry"].served == [("server", "options")]
    with pytest.raises(WorldError, match="only workers"):
        registry.serve(Plugin("mine", "", NoOptions, ()), world, None, 1.0)


def test_a_broken_plugin_is_told_and_takes_nothing_along(tmp_path):
    """Its module fails at import; the other backends, and the table of all, do not."""
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[unidist.backends]\nbroken = broken_backend:plugin\n")
    (tmp_path / "broken_backend.py").write_text("raise OSError('libmoon.so is missing')\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}

    def unidist(*arguments):
        command = [sys.executable, "-m", "unidist", *arguments]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)

    table = unidist("backends")
    assert table.returncode == 0, table.stderr
    assert "libmoon.so is missing" in next(line for line in table.stdout.splitlines() if line.startswith("broken"))
    assert any(line.startswith("torch") for line in table.stdout.splitlines())
    named = unidist("run", "--backend", "broken", __file__)
    assert named.returncode == 1
    assert "Traceback" not in named.stderr
    assert "libmoon.so is missing" in named.stderr

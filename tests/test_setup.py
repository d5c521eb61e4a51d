"""`unidist setup` on recipes small enough for a test: real environments, but nothing to download."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from launch_support import PATIENCE, ROOT, alive
from small_wheels import wheel
from unidist import registry
from unidist.backend import Plugin
from unidist.cli import setup
from unidist.errors import LaunchError, SetupError
from unidist.launch import environments
from unidist.setup import build, pythons, recipes, store
from unidist.setup.recipes import Recipe, Stage

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
GOOD = "print('proven')"


class Lab:
    """A cache of its own and probes that tell how often they ran."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def probe(self, name: str, body: str = GOOD) -> str:
        file = self.path / f"{name}.py"
        count = f"open({str(self.path / f'{name}.runs')!r}, 'a').write(sys.executable + '\\n')"
        file.write_text(f"import os, sys, time\n{count}\n{textwrap.dedent(body)}\n")
        return str(file)

    def runs(self, name: str) -> int:
        file = self.path / f"{name}.runs"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def recipe(self, *stages: Stage) -> Recipe:
        return Recipe("tiny", (PYTHON,), stages)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.setenv("UNIDIST_HOME", str(tmp_path / "a home"))
    monkeypatch.setattr(build, "VENV", ("-m", "venv", "--without-pip"))  # which takes seconds
    return Lab(tmp_path)


def test_built_once_then_found(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = lab.recipe(Stage("one", (), lab.probe("one")))
    assert store.find(recipe, "one") is None
    environment = build.ensure(recipe, ["one"])
    assert "tiny: new environment" in capsys.readouterr().err
    assert store.find(recipe, "one") == environment
    assert (lab.path / "one.runs").read_text().strip() == str(environment.python)
    assert build.ensure(recipe, ["one"]) == environment
    assert (lab.runs("one"), capsys.readouterr().err) == (1, "")
    log = Path(environment.ready()["one"]["log"])
    assert "proven" in log.read_text()
    build.ensure(recipe, ["one"], force=True)
    assert lab.runs("one") == 2


def test_stages_grow_in_place_and_a_failing_one_does_not_take_the_others_along(lab: Lab) -> None:
    bad = Stage("bad", (), lab.probe("bad", "print('it is the wrong moon', file=sys.stderr); sys.exit(3)"))
    recipe = lab.recipe(Stage("one", (), lab.probe("one")), Stage("two", (), lab.probe("two"), after=("one",)), bad)
    environment = build.ensure(recipe, ["one"])
    (environment.path / "kept").touch()
    assert build.ensure(recipe, ["two"]) == environment
    assert sorted(environment.ready()) == ["one", "two"]
    assert (environment.path / "kept").exists()
    with pytest.raises(SetupError, match="it is the wrong moon") as caught:
        build.ensure(recipe, ["bad"])
    assert "bad: probe: failed (exit code 3)" in str(caught.value)
    assert ".log" in str(caught.value)
    assert sorted(environment.ready()) == ["one", "two"]
    # What the failed stage installed is not trusted: the next attempt is a new environment, with all that was ready.
    lab.probe("bad", GOOD)
    after = build.ensure(recipe, ["bad"])
    assert sorted(after.ready()) == ["bad", "one", "two"]
    assert not environment.path.exists()
    assert lab.runs("one") == 2


def test_the_old_one_stays_until_the_new_one_works(lab: Lab) -> None:
    recipe = lab.recipe(Stage("one", (), lab.probe("one")))
    before = build.ensure(recipe, ["one"])
    lab.probe("one", "sys.exit(1)")
    with pytest.raises(SetupError):
        build.ensure(recipe, ["one"], force=True)
    assert store.find(recipe, "one") == before
    lab.probe("one", GOOD)
    after = build.ensure(recipe, ["one"], force=True)
    assert after.path != before.path
    assert store.find(recipe, "one") == after
    assert [path.name for path in before.path.parent.glob("*/")] == [after.path.name]  # nothing half-built either


def test_what_a_stage_stands_on_comes_with_it(lab: Lab) -> None:
    recipe = lab.recipe(Stage("one", (), lab.probe("one")), Stage("two", (), lab.probe("two"), after=("one",)))
    assert sorted(build.ensure(recipe, ["two"]).ready()) == ["one", "two"]


def test_another_recipe_is_another_environment(lab: Lab) -> None:
    before = lab.recipe(Stage("one", (), lab.probe("one")))
    environment = build.ensure(before, ["one"])
    after = lab.recipe(Stage("zero", (), lab.probe("zero")), Stage("one", (), lab.probe("one"), after=("zero",)))
    assert store.find(after, "one") is None
    assert store.find(before, "one") == environment
    build.ensure(after, ["one"])
    assert store.find(after, "one") != environment
    assert store.find(before, "one") == environment  # a job of an older unidist may be using it


def test_what_no_recipe_knows_is_removed_when_asked(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    old = build.ensure(lab.recipe(Stage("one", (), lab.probe("one"))), ["one"])
    recipe = lab.recipe(Stage("two", (), lab.probe("two")))
    current = build.ensure(recipe, ["two"])
    monkeypatch.setattr(recipes, "recipes", lambda: [recipe])
    overlay, stale = environments.overlay(), store.home() / "overlays" / "stale"
    stale.mkdir()
    (stale / "unidist").symlink_to(lab.path / "a checkout that is gone")
    for path in store.outdated():
        store.remove(path)
    assert not old.path.exists()
    assert not stale.exists()
    assert overlay.exists()
    assert store.find(recipe, "two") == current


def test_an_environment_whose_interpreter_is_gone_is_not_ready(lab: Lab) -> None:
    recipe = lab.recipe(Stage("one", (), lab.probe("one")))
    environment = build.ensure(recipe, ["one"])
    environment.python.unlink()
    environment.python.symlink_to(lab.path / "no such python")
    assert store.find(recipe, "one") is None
    build.ensure(recipe, ["one"])
    assert store.find(recipe, "one")


@pytest.mark.parametrize("text", ["", "[]", "null", '{"stages": []}', '{"python": "x", "stages": {"one": {}}}'])
def test_a_damaged_marker_is_none(lab: Lab, text: str) -> None:
    recipe = lab.recipe(Stage("one", (), lab.probe("one")))
    (build.ensure(recipe, ["one"]).path / store.MARKER).write_text(text)
    assert store.find(recipe, "one") is None


def test_a_place_that_cannot_be_written(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIDIST_HOME", "/proc/nothing")
    with pytest.raises(SetupError, match="name another place with --dir"):
        build.ensure(lab.recipe(Stage("one", (), lab.probe("one"))), ["one"])
    overlay = environments.overlay()  # which a job needs that has its framework already
    assert (overlay / "unidist" / "__init__.py").exists()
    assert not str(overlay).startswith("/proc")


def test_a_probe_that_hangs_is_ended(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "PROBE_TIMEOUT", 20.0)  # in which the probe comes to its child on a busy machine, too
    body = """
        import subprocess
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print("child", child.pid, flush=True)
        time.sleep(600)
    """
    with pytest.raises(SetupError, match="took longer than") as caught:
        build.ensure(lab.recipe(Stage("one", (), lab.probe("one", textwrap.dedent(body)))), ["one"])
    child = int(str(caught.value).partition("child ")[2].split()[0])
    until = time.monotonic() + PATIENCE
    while alive(child):
        assert time.monotonic() < until
        time.sleep(0.02)


def setup_process(lab: Lab, body: str) -> subprocess.Popen[str]:
    """Another process that builds the recipe with stage "one"."""
    code = f"""
        import sys
        from unidist.setup import build
        from unidist.setup.recipes import Recipe, Stage
        build.VENV = {build.VENV}
        stage = Stage("one", (), {lab.probe("one", body)!r})
        print(build.ensure(Recipe("tiny", ({PYTHON!r},), (stage,)), ["one"]).path)
    """
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_an_interruption_leaves_nothing_that_looks_ready(lab: Lab, number: signal.Signals) -> None:
    recipe = lab.recipe(Stage("one", (), lab.probe("one")))
    process = setup_process(lab, "open('%s', 'w').write(str(os.getpid())); time.sleep(600)" % (lab.path / "pid"))
    until = time.monotonic() + PATIENCE
    while not ((lab.path / "pid").exists() and (lab.path / "pid").read_text()):
        assert time.monotonic() < until
        time.sleep(0.02)
    process.send_signal(number)
    process.communicate(timeout=PATIENCE)
    assert process.returncode != 0
    assert store.find(recipe, "one") is None
    while alive(int((lab.path / "pid").read_text())):  # nor does the step go on by itself
        assert time.monotonic() < until
        time.sleep(0.02)
    lab.probe("one", GOOD)
    build.ensure(recipe, ["one"])
    assert store.find(recipe, "one")


def test_two_at_once_build_once(lab: Lab) -> None:
    go = lab.path / "go"
    first = setup_process(lab, f"while not os.path.exists({str(go)!r}): time.sleep(0.02)")
    until = time.monotonic() + PATIENCE
    while not lab.runs("one"):
        assert time.monotonic() < until
        time.sleep(0.02)
    second = setup_process(lab, f"while not os.path.exists({str(go)!r}): time.sleep(0.02)")
    assert second.stderr
    assert f"process {first.pid} is building" in second.stderr.readline()
    go.touch()
    outputs = [job.communicate(timeout=PATIENCE) for job in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), outputs
    assert outputs[0][0] == outputs[1][0]
    assert lab.runs("one") == 1


@pytest.mark.parametrize(
    ("offered", "gpus", "installed", "told"),
    [(("1.0", "1.0+cpu"), 0, "1.0+cpu", False), (("1.0",), 0, "1.0", True), (("1.0",), 1, "1.0", False)],
    ids=["no GPU", "no such build", "a GPU"],
)
def test_the_build_without_cuda_where_nobody_needs_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    offered: tuple[str, ...],
    gpus: int,
    installed: str,
    told: bool,
) -> None:
    for version in offered:
        wheel(tmp_path, "tiny", version)
    monkeypatch.setenv("UNIDIST_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr(build, "gpus", lambda: gpus)
    lab = Lab(tmp_path)
    probe = lab.probe("one", f"import tiny; assert tiny.version == {installed!r}, tiny.version")
    stage = Stage("one", ("tiny==1.0",), probe, without_gpu=("tiny==1.0+cpu",), otherwise="it is large")
    build.ensure(lab.recipe(stage), ["one"])
    assert ("it is large" in capsys.readouterr().err) == told


# -- interpreters --------------------------------------------------------------------------------------------------


def fake_python(path: Path, version: str, works: bool = True) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{f'echo {version} $0' if works else 'echo pyenv: command not found >&2; exit 127'}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No interpreter anywhere but in what a test puts below."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/bin:/usr/bin")
    for name in ("PYENV_ROOT", "CONDA_PREFIX", "UV_PYTHON_INSTALL_DIR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_a_shim_that_does_not_run_is_passed_over(nowhere: Path) -> None:
    fake_python(nowhere / "bin/python3.99", "", works=False)
    real = fake_python(nowhere / ".pyenv/versions/3.99.4/bin/python3.99", "3.99.4")
    assert pythons.find(("3.99",)) == (real, "3.99.4")


def test_path_comes_before_pyenv_and_the_preferred_version_before_both(nowhere: Path) -> None:
    fake_python(nowhere / ".pyenv/versions/3.99.4/bin/python3.99", "3.99.4")
    on_path = fake_python(nowhere / "bin/python3.99", "3.99.1")
    assert pythons.find(("3.99", "3.98")) == (on_path, "3.99.1")
    fake_python(nowhere / "bin/python3.98", "3.98.1")
    assert pythons.find(("3.98", "3.99"))[1] == "3.98.1"


def test_the_running_one_is_taken_when_it_fits_and_none_is_preferred(nowhere: Path) -> None:
    fake_python(nowhere / f"bin/python{PYTHON}", f"{PYTHON}.0")
    found, version = pythons.find(("3.99", PYTHON))
    assert os.path.samefile(found, sys.executable)
    assert version == ".".join(map(str, sys.version_info[:3]))
    preferred = fake_python(nowhere / "bin/python3.99", "3.99.1")
    assert pythons.find(("3.99", PYTHON)) == (preferred, "3.99.1")


def test_a_missing_interpreter_is_told_before_anything_is_built(nowhere: Path, lab: Lab) -> None:
    later = Recipe("later", ("3.99",), (Stage("two", (), lab.probe("two")),))
    asked = [(lab.recipe(Stage("one", (), lab.probe("one"))), ["one"]), (later, ["two"])]
    with pytest.raises(SetupError, match=r"two: Python 3\.99 is needed.*nothing was built; `unidist setup one` can be"):
        setup.refuse_what_has_no_python(asked, None)


def fake_uv(folder: Path, python: str) -> Path:
    """What `uv python install 3.99` does, with a mirror that needs no network. It writes down how it was called."""
    fake_python(folder / "mirror/python3.99", python)
    target = folder / ".local/share/uv/python/cpython-3.99/bin"
    uv = folder / "bin/uv"
    uv.parent.mkdir(exist_ok=True)
    uv.write_text(
        f'#!/bin/sh\necho "$@" >> "{folder}/calls"\nmkdir -p {target}\ncp {folder}/mirror/python3.99 {target}\n'
    )
    uv.chmod(0o755)
    return folder / "calls"


def test_a_missing_python_is_fetched_by_uv_only_when_asked(
    nowhere: Path, lab: Lab, capfd: pytest.CaptureFixture[str]
) -> None:
    calls = fake_uv(nowhere, "3.99.2")
    asked = [(Recipe("later", ("3.99",), (Stage("two", (), lab.probe("two")),)), ["two"])]
    with pytest.raises(SetupError, match=r"add --yes: `uv python install 3\.99`.*nothing was built"):
        setup.refuse_what_has_no_python(asked, None)
    assert not calls.exists()
    setup.refuse_what_has_no_python(asked, None, may_fetch=True)
    assert calls.read_text() == "python install 3.99\n"
    assert "Python 3.99 is missing and is fetched now: uv python install 3.99" in capfd.readouterr().err
    assert pythons.find(("3.99",))[1] == "3.99.2"
    setup.refuse_what_has_no_python(asked, None, may_fetch=True)
    assert calls.read_text() == "python install 3.99\n"  # not again


def test_a_fetch_that_fails_and_a_machine_without_uv(nowhere: Path, lab: Lab) -> None:
    asked = [(Recipe("later", ("3.99",), (Stage("two", (), lab.probe("two")),)), ["two"])]
    with pytest.raises(SetupError, match=r"Install one \(`pyenv install 3\.99`.*nothing was built"):
        setup.refuse_what_has_no_python(asked, None, may_fetch=True)
    uv = nowhere / "bin/uv"
    uv.parent.mkdir(exist_ok=True)
    uv.write_text("#!/bin/sh\nexit 3\n")
    uv.chmod(0o755)
    with pytest.raises(SetupError, match=r"`uv python install 3\.99` failed \(exit code 3\)"):
        setup.refuse_what_has_no_python(asked, None, may_fetch=True)


def test_none_found_says_what_to_install(nowhere: Path) -> None:
    with pytest.raises(SetupError, match=r"pyenv install 3\.99.*--python PATH"):
        pythons.find(("3.99",))


def test_a_named_one_is_checked(nowhere: Path) -> None:
    wrong = fake_python(nowhere / "some/python", "3.7.1")
    with pytest.raises(SetupError, match=r"is Python 3\.7\.1; this needs Python 3\.99"):
        pythons.find(("3.99",), wrong)
    real = fake_python(nowhere / ".pyenv/versions/3.98.4/bin/python3.98", "3.98.4")
    assert pythons.find(("3.99", "3.98"), "3.98") == (real, "3.98.4")
    with pytest.raises(SetupError, match=r"--python 3\.97: this needs Python 3\.99"):
        pythons.find(("3.99",), "3.97")
    with pytest.raises(SetupError, match=r"--python 2\.7: this needs Python 3\.99 or 3\.98"):
        pythons.find(("3.99", "3.98"), "2.7")
    with pytest.raises(SetupError, match=r"does not run.*this needs Python 3\.99"):
        pythons.find(("3.99",), str(nowhere / "nothing"))


# -- recipes -------------------------------------------------------------------------------------------------------


def test_recipes_are_consistent() -> None:
    names = recipes.names()
    assert len(names) == len(set(names))
    for recipe in recipes.recipes():
        for stage in recipe.stages:
            assert Path(stage.probe).is_file()
            earlier = [each.name for each in recipe.stages[: recipe.stages.index(stage)]]
            assert set(stage.after) <= set(earlier)


def test_plug_ins_that_name_the_same_recipe_share_an_environment(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever comes first by name, what a stage stands on is built before it."""

    def plugin(name: str, *, after: tuple[str, ...] = (), every: tuple[str, ...] = ()) -> Plugin:
        stage = Stage(name, (), lab.probe(name), after=after)
        return Plugin(name, "", object, (), recipe=Recipe("both", ("3.11",), (stage,), every))

    plugins = [plugin("above", after=("below",)), plugin("below")]
    monkeypatch.setattr(registry, "loadable", lambda: plugins)
    both = recipes.recipe_of("above")
    assert both is not None
    assert both == recipes.recipe_of("below")
    assert [stage.name for stage in both.stages] == ["below", "above"]
    plugins.append(plugin("other", every=("something",)))
    assert recipes.recipe_of("above") == both, "one that does not fit does no harm to the others"
    assert recipes.recipe_of("other") is None
    with pytest.raises(SetupError, match=r"another plug-in \(below, above\) .* Give one of their recipes another name"):
        recipes.check("other")
    plugins[2:] = [plugin("round", after=("round",))]
    with pytest.raises(SetupError, match="come after each other"):
        recipes.check("round")
    del plugins[1:]
    alone = recipes.recipe_of("above")
    assert alone is not None
    with pytest.raises(SetupError, match="needs below, which none of the backends"):
        build.ensure(alone, ["above"])


def test_the_command_lists_and_helps(lab: Lab) -> None:
    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "unidist", "setup", *arguments]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE)

    listed = call("--list")
    assert listed.returncode == 0
    assert [line.split()[0] for line in listed.stdout.splitlines()] == recipes.names()
    assert "torch==" in listed.stdout
    assert "Did you mean 'torch'?" in call("troch").stderr
    assert "name what to set up" in call().stderr
    with contextlib.suppress(FileNotFoundError):
        assert os.listdir(store.home()) == []  # asking builds nothing


# -- this unidist, in an environment that does not have it -----------------------------------------------------------


def test_another_environment_imports_this_unidist_and_its_backends(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = build.ensure(lab.recipe(Stage("one", (), lab.probe("one"))), ["one"])
    monkeypatch.delenv("PYTHONPATH", raising=False)
    code = """
        import sys, unidist, unidist_torch, unidist.registry
        from importlib.metadata import entry_points, version
        assert "numpy" not in sys.modules and "torch" not in sys.modules
        assert "torch" in {entry.name for entry in entry_points(group="unidist.backends")}
        assert unidist.registry.plugin("torch").name == "torch"
        print(version("unidist-train"), *sys.path)
    """
    env = {**os.environ, **environments.importable()}
    command = [str(environment.python), "-c", textwrap.dedent(code)]
    ended = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 0, ended.stderr
    assert not [path for path in ended.stdout.split() if path.startswith(sys.prefix + os.sep) and "site-pack" in path]
    assert environments.overlay() == environments.overlay()


def test_a_backend_runs_where_it_was_set_up(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = lab.recipe(Stage("torch", (), lab.probe("one")))
    monkeypatch.setattr(recipes, "recipes", lambda: [recipe])
    monkeypatch.setattr(registry, "missing", lambda plugin: ["torch"])
    with pytest.raises(LaunchError, match="unidist setup torch` once"):
        environments.interpreter_for("torch")
    environment = build.ensure(recipe, ["torch"])
    with pytest.raises(LaunchError, match=r"has lost torch.*setup torch --force"):
        environments.interpreter_for("torch")
    package = next((environment.path / "lib").glob("python3*/site-packages")) / "torch"
    package.mkdir()
    (package / "__init__.py").touch()
    assert environments.interpreter_for("torch")[0] == str(environment.python)
    monkeypatch.undo()
    monkeypatch.setattr(registry, "missing", lambda plugin: [])
    assert environments.interpreter_for("torch")[0] == sys.executable

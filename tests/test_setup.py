"""`unidist setup` on recipes small enough for a test: real environments, but nothing to download."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from launch_support import PATIENCE, ROOT, alive
from setup_support import GOOD, PYTHON, Lab
from small_wheels import wheel
from unidist.errors import SetupError
from unidist.launch import environments
from unidist.setup import build, recipes, store
from unidist.setup.recipes import Stage

pytest_plugins = ["setup_support"]


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

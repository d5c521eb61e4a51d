"""The recipes of the backends, the command that lists them, and this unidist in an environment that was made."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from launch_support import PATIENCE, ROOT
from setup_support import Lab
from unidist import registry
from unidist.backend import Plugin
from unidist.errors import LaunchError, SetupError
from unidist.launch import environments
from unidist.setup import build, recipes, store
from unidist.setup.recipes import Recipe, Stage

pytest_plugins = ["setup_support"]


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

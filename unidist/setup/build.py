"""Builds an environment from its recipe, so that an interruption at any moment leaves nothing that looks ready."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from unidist.errors import SetupError
from unidist.launch.processes import gpus
from unidist.setup import additions, locks, pythons, store
from unidist.setup.progress import Progress
from unidist.setup.recipes import Recipe, SourceBuild, Stage
from unidist.setup.steps import Steps, clean, constraints, log_of, pip, versions
from unidist.setup.store import Environment

PROBE_TIMEOUT = 180.0
VENV = ("-m", "venv")
PIP = "pip>=23"


def ensure(
    recipe: Recipe,
    stages: Sequence[str],
    python: str | None = None,
    force: bool = False,
    extra: Sequence[str] = (),
) -> Environment:
    """The environment with `stages` (and what they stand on) ready in it, and the packages `extra` beside them; what is
    not there is built or added now."""
    below = {recipe.stage(name).name for stage in stages for name in recipe.stage(stage).after}
    wanted = [stage for stage in recipe.stages if stage.name in below or stage.name in stages]
    interpreter, version = pythons.find(recipe.python, python) if python else (None, None)

    def ready() -> Environment | None:
        found = (candidate for candidate in store.existing(recipe, version) if not _lacking(candidate, wanted))
        return next((made for made in found if set(extra) <= set(made.added)), None)

    if not force and (found := ready()):
        return found
    progress = Progress()
    with _lock(recipe, progress):
        if not force and (found := ready()):  # another process was faster
            return found
        can_grow = (candidate for candidate in store.existing(recipe, version) if not candidate.interrupted)
        environment = None if force else next(can_grow, None)
        if environment:
            steps = Steps(progress, log_of(environment))
            _grow(environment, environment.made_with, _lacking(environment, wanted), steps)
        else:
            if interpreter is None or version is None:
                interpreter, version = pythons.find(recipe.python)
            environment = _build(recipe, interpreter, version, wanted, progress)
        additions.add(environment, extra, Steps(progress, log_of(environment)))
        return environment


def _lacking(environment: Environment, wanted: Sequence[Stage]) -> list[Stage]:
    ready = environment.ready()
    return [stage for stage in wanted if stage.name not in ready]


def _build(recipe: Recipe, interpreter: str, version: str, wanted: Sequence[Stage], progress: Progress) -> Environment:
    """Build a new one beside the old, which goes when the new one has all that it had, unless somebody is using it."""
    old, remembered = store.existing(recipe, version), additions.remembered(recipe)
    wanted = [stage for stage in recipe.stages if stage in wanted or any(stage.name in one.ready() for one in old)]
    environment = store.new(recipe, version)
    steps = Steps(progress, log_of(environment))
    steps.run(f"{recipe.name}: new environment with {interpreter}", [interpreter, *VENV, str(environment.path)])
    if recipe.every or any(stage.packages for stage in wanted):
        # Older ones, as some Pythons bring along, cannot report what they install, or not its hashes.
        steps.run(f"{recipe.name}: {PIP}", pip(environment, PIP))
    if recipe.every:
        _install(environment, recipe.name, recipe.every, steps)
    _grow(environment, interpreter, wanted, steps)
    additions.add_again(environment, remembered, steps)
    for previous in old:
        if store.in_use(previous.path):
            progress.say(f"{previous.path} is in use and stays; `unidist setup --prune` removes it later")
        else:
            store.remove(previous.path)
    return environment


def _grow(environment: Environment, interpreter: str, stages: Sequence[Stage], steps: Steps) -> None:
    ready, growing = environment.ready(), environment.path / store.GROWING
    for stage in stages:
        growing.touch()
        if stage.packages:
            _install(environment, stage.name, _packages(environment, stage, steps), steps)
        if stage.build:
            _install(environment, stage.name, [str(_wheel(environment, stage, stage.build, steps))], steps)
        steps.run(
            f"{stage.name}: probe",
            [str(environment.python), "-I", stage.probe],
            env=environment.variables(),
            timeout=PROBE_TIMEOUT,
        )
        ready[stage.name] = {"versions": versions(environment), "log": str(steps.path)}
        environment.mark(interpreter, ready, environment.added)  # what was added is proven with it now, and stays
        growing.unlink()


def _install(environment: Environment, name: str, packages: Sequence[str], steps: Steps) -> None:
    """What is there already stays as it is: other stages were proven with it. What is new is as the lock has it."""
    lock = locks.read(environment.recipe, pythons.short(environment.version))
    report = environment.path / "unidist-installed.json"
    pinned = constraints(environment, lock={package: locked.version for package, locked in lock.items()})
    command = pip(environment, "-c", pinned, "--report", str(report), *packages)
    steps.run(f"{name}: {', '.join(map(os.path.basename, packages))}", command)
    locks.check(report, lock)


def _packages(environment: Environment, stage: Stage, steps: Steps) -> tuple[str, ...]:
    """Those without CUDA, where nobody needs it and pip has them from somewhere."""
    if not stage.without_gpu or gpus():
        return stage.packages
    look = pip(environment, "--dry-run", "--no-deps", "--quiet", *stage.without_gpu)
    if subprocess.run(look, capture_output=True, stdin=subprocess.DEVNULL, env=clean()).returncode == 0:
        return stage.without_gpu
    steps.say(f"{stage.name}: {stage.otherwise}")
    return stage.packages


def _wheel(environment: Environment, stage: Stage, build: SourceBuild, steps: Steps) -> Path:
    """The package built from source against what is in this environment, from the cache when it was built before."""
    against = [environment.recipe.stage(name).key for name in stage.after]
    python = next((environment.path / "lib").glob("python3*")).name
    key = hashlib.sha256(repr((build, stage.packages, against, python)).encode()).hexdigest()[:12]
    name = build.requirement.partition("==")[0]
    cache = store.home() / "wheels" / f"{name}-{key}"
    if found := next(cache.glob("*.whl"), None):
        return found
    cache.parent.mkdir(parents=True, exist_ok=True)
    prefix = f"build-{environment.recipe.key}-"
    for left in cache.parent.glob(f"{prefix}*"):  # by a build that was killed: we have the lock, nobody is at it
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=cache.parent) as aside:
        work = Path(aside)
        # Beside the environment, not in it: the old setuptools that the build needs is too old for others there.
        tools = str(work / "tools")
        env = {**build.env, "PYTHONPATH": tools, "PATH": os.pathsep.join([f"{tools}/bin", os.environ.get("PATH", "")])}
        steps.run(f"{name}: build tools", pip(environment, "--target", tools, *build.tools))
        fetch = pip(environment, "--no-deps", "--no-binary", ":all:", "--no-build-isolation", verb="download")
        steps.run(f"{name}: source", [*fetch, "-d", aside, build.requirement], env)
        with tarfile.open(next(work.glob("*.tar.gz"))) as archive:
            archive.extraction_filter = staticmethod(getattr(tarfile, "data_filter", tarfile.fully_trusted_filter))
            archive.extractall(work / "source")
        source = next((work / "source").iterdir())
        for file, old, new in build.replace:
            text = (source / file).read_text()
            if old not in text:
                raise SetupError(f"{name}: {file} does not hold {old!r} any more; the recipe needs a look")
            (source / file).write_text(text.replace(old, new))
        wheel = pip(environment, "--no-deps", "--no-build-isolation", "-w", str(work / "wheel"), verb="wheel")
        steps.run(f"{name}: compiling (some minutes)", [*wheel, str(source)], env)
        (work / "wheel").rename(cache)
    return next(cache.glob("*.whl"))


@contextlib.contextmanager
def _lock(recipe: Recipe, progress: Progress) -> Iterator[None]:
    """One builder at a time for each recipe. The kernel lets go of it when the builder dies."""
    directory = store.home() / "environments"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = open(directory / f"{recipe.name}-{recipe.key}.lock", "a+")  # noqa: SIM115
    except OSError as error:
        raise SetupError(f"cannot write to {directory}: {error.strerror}; name another place with --dir") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            progress.say(f"process {file.read().strip() or '?'} is building {recipe.name}: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield

"""Builds an environment from its recipe, so that an interruption at any moment leaves nothing that looks ready."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from unidist.errors import SetupError
from unidist.launch.plan import inherited
from unidist.launch.processes import EndWithParent
from unidist.setup import pythons, store
from unidist.setup.progress import Progress
from unidist.setup.recipes import PROBES, Recipe, SourceBuild, Stage
from unidist.setup.store import Environment

PROBE_TIMEOUT = 180.0
VENV = ("-m", "venv")
FOREIGN = {"PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_USER"}  # pip must look at its own place only


def ensure(recipe: Recipe, stages: Sequence[str], python: str | None = None, force: bool = False) -> Environment:
    """The environment with `stages` (and what they stand on) ready in it, built now where it is not."""
    below = {name for stage in stages for name in recipe.stage(stage).after}
    wanted = [stage for stage in recipe.stages if stage.name in below or stage.name in stages]
    interpreter, version = pythons.find(recipe.python, python) if python else (None, None)

    def ready() -> Environment | None:
        return next((each for each in store.existing(recipe, version) if not _lacking(each, wanted)), None)

    if not force and (found := ready()):
        return found
    progress = Progress()
    with _lock(recipe, progress):
        if not force and (found := ready()):  # another process was faster
            return found
        can_grow = (each for each in store.existing(recipe, version) if not each.interrupted)
        environment = None if force else next(can_grow, None)
        if environment:
            steps = _Steps(progress, _log(environment))
            _grow(environment, environment.made_with, _lacking(environment, wanted), steps)
            return environment
        if interpreter is None or version is None:
            interpreter, version = pythons.find(recipe.python)
        return _build(recipe, interpreter, version, wanted, progress)


def _lacking(environment: Environment, wanted: Sequence[Stage]) -> list[Stage]:
    ready = environment.ready()
    return [stage for stage in wanted if stage.name not in ready]


def _build(recipe: Recipe, interpreter: str, version: str, wanted: Sequence[Stage], progress: Progress) -> Environment:
    """A new one beside the old, which goes when all that it had is in the new one, unless somebody is using it."""
    old = store.existing(recipe, version)
    wanted = [each for each in recipe.stages if each in wanted or any(each.name in one.ready() for one in old)]
    environment = store.new(recipe, version)
    steps = _Steps(progress, _log(environment))
    steps.run(f"{recipe.name}: new environment with {interpreter}", [interpreter, *VENV, str(environment.path)])
    if recipe.every:
        steps.run(f"{recipe.name}: {', '.join(recipe.every)}", _pip(environment, *recipe.every))
    _grow(environment, interpreter, wanted, steps)
    for each in old:
        if store.in_use(each.path):
            progress.say(f"{each.path} is in use and stays; `unidist setup --prune` removes it later")
        else:
            store.remove(each.path)
    return environment


def _grow(environment: Environment, interpreter: str, stages: Sequence[Stage], steps: _Steps) -> None:
    ready, growing = environment.ready(), environment.path / store.GROWING
    for stage in stages:
        wheels = [str(_wheel(environment, stage, stage.build, steps))] if stage.build else []
        growing.touch()
        if wheels or stage.packages:
            # What is there already stays as it is: other stages were proven with it.
            install = _pip(environment, "-c", _freeze(environment), *wheels, *stage.packages)
            steps.run(f"{stage.name}: {', '.join([*map(os.path.basename, wheels), *stage.packages])}", install)
        steps.run(
            f"{stage.name}: probe",
            [str(environment.python), str(PROBES / stage.probe)],
            env=environment.variables(),
            timeout=PROBE_TIMEOUT,
        )
        ready[stage.name] = {"versions": _versions(environment), "log": str(steps.path)}
        environment.mark(interpreter, ready)
        growing.unlink()


def _wheel(environment: Environment, stage: Stage, build: SourceBuild, steps: _Steps) -> Path:
    """The package built from source against what is in this environment, from the cache when it was built before."""
    against = [environment.recipe.stage(name).key for name in stage.after]
    python = next((environment.path / "lib").glob("python3*")).name
    key = hashlib.sha256(repr((build, against, python)).encode()).hexdigest()[:12]
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
        steps.run(f"{name}: build tools", _pip(environment, "--target", tools, *build.tools))
        fetch = _pip(environment, "--no-deps", "--no-binary", ":all:", "--no-build-isolation", verb="download")
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
        wheel = _pip(environment, "--no-deps", "--no-build-isolation", "-w", str(work / "wheel"), verb="wheel")
        steps.run(f"{name}: compiling (some minutes)", [*wheel, str(source)], env)
        (work / "wheel").rename(cache)
    return next(cache.glob("*.whl"))


def _pip(environment: Environment, *arguments: str, verb: str = "install") -> list[str]:
    return [str(environment.python), "-m", "pip", verb, "--no-input", "--disable-pip-version-check", *arguments]


def _freeze(environment: Environment) -> str:
    """A pip constraints file that keeps every package at the version it has."""
    file = environment.path / "unidist-constraints.txt"
    kept = {k: v for k, v in _versions(environment).items() if k not in ("pip", "setuptools", "wheel")}
    file.write_text("".join(f"{name}=={version}\n" for name, version in kept.items()))
    return str(file)


def _versions(environment: Environment) -> dict[str, str]:
    ask = "import importlib.metadata as m; [print(d.metadata['Name'], d.version) for d in m.distributions()]"
    answer = subprocess.run([str(environment.python), "-I", "-c", ask], capture_output=True, text=True, check=True)
    return dict(line.split(" ", 1) for line in answer.stdout.splitlines() if line.strip())


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


def _log(environment: Environment) -> Path:
    directory = store.home() / "logs"
    directory.mkdir(parents=True, exist_ok=True)
    return directory / f"{environment.path.name}-{time.strftime('%Y%m%d-%H%M%S')}.log"


class _Steps:
    """Runs the steps of a build: progress on the screen, everything in the log, the last lines when one fails."""

    def __init__(self, progress: Progress, path: Path) -> None:
        self._progress = progress
        self.path = path

    def run(
        self, label: str, command: Sequence[str], env: Mapping[str, str] | None = None, timeout: float | None = None
    ) -> None:
        self._progress.begin(label)
        begun = time.monotonic()
        base = {name: value for name, value in inherited().items() if name not in FOREIGN}
        with open(self.path, "ab") as log:
            log.write(f"\n## {label}\n$ {' '.join(command)}\n".encode())
            log.flush()
            start = log.tell()
            child = subprocess.Popen(
                command,
                env={**base, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=EndWithParent(),
            )
            try:
                while child.poll() is None:
                    self._progress.tick(self._last(start, 1))
                    if timeout is not None and time.monotonic() - begun > timeout:
                        raise SetupError(self._explain(label, f"took longer than {timeout:g} s", start))
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.wait(0.15)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)  # also what it started
                child.wait()
        if child.returncode != 0:
            raise SetupError(self._explain(label, f"failed (exit code {child.returncode})", start))
        self._progress.done()

    def _last(self, start: int, count: int) -> str:
        with open(self.path, "rb") as log:
            log.seek(max(start, os.path.getsize(self.path) - 8192))
            lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        return "\n".join(lines[-count:])

    def _explain(self, label: str, what: str, start: int) -> str:
        last = "".join(f"\n    {line}" for line in self._last(start, 15).splitlines())
        return f"{label}: {what}. Its last lines:{last}\n  The whole log: {self.path}"

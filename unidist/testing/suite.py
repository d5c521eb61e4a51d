"""Runs the checks on fresh processes, through `unidist run`, and hands the results to pytest one by one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from unidist.testing import checks  # noqa: F401  # registers them
from unidist.testing.case import CHECKS, close

LAUNCH_TIMEOUT = 900.0  # seconds for all checks of one launch, on a machine that is busy; a hang is a failure
RESUMES = "resumes in mid-epoch at world size"
SCENARIOS = {"raises": (1, "the victim's own error"), "exits": (7, "exit code 7"), "is killed": (137, "SIGKILL")}


@dataclass(frozen=True)
class Configuration:
    """One launch: a backend with its options at one world size."""

    backend: str
    zoo: str
    world_size: int
    options: tuple[tuple[str, Any], ...] = ()
    servers: int = 0
    python: str = field(default=sys.executable, repr=False)  # the launcher's; ranks may run in another environment
    environment: tuple[tuple[str, str], ...] = field(default=(), repr=False)  # of the launcher

    def __str__(self) -> str:
        return "-".join([self.backend, *(f"{value}" for _, value in self.options), f"{self.world_size}"])

    def command(self, module: str, *arguments: str) -> list[str]:
        options = [
            f"--option={name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in self.options
        ]
        servers = [f"--servers={self.servers}"] if self.servers else []
        launcher = [self.python, "-m", "unidist", "run", f"--backend={self.backend}", f"--nproc={self.world_size}"]
        return [*launcher, *servers, *options, "-m", module, *arguments]

    def start(self, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a module on every rank. On a timeout the launcher is ended, and with it every process of the job."""
        root = str(Path(__file__).resolve().parents[2])  # so that `-m unidist` finds this unidist in a bare clone too
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **dict(self.environment)}
        return subprocess.run(
            self.command(module, *arguments),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LAUNCH_TIMEOUT,
        )


class Skipped(str):
    """Why a check does not apply."""


def report(outcome: str | None) -> None:
    """One result of `run`, as pytest has it."""
    import pytest

    if isinstance(outcome, Skipped):
        pytest.skip(outcome)
    assert outcome is None, outcome


@cache
def run(configuration: Configuration, names: tuple[str, ...] | None = None) -> dict[str, str | None]:
    """Check -> None if it passed on every rank, `Skipped` if it applies on none, else what went wrong where.

    One launch does them all. A failed check leaves the ranks in different places, so the rest gets a new launch.
    """
    waiting = list(CHECKS if names is None else names)
    outcome: dict[str, str | None] = {}
    while waiting:
        ranks, end, code = _launch(configuration, waiting)
        failed = False
        while waiting and all(waiting[0] in rank for rank in ranks):
            name = waiting.pop(0)
            outcome[name] = _together([rank[name] for rank in ranks])
            failed = outcome[name] is not None and not isinstance(outcome[name], Skipped)
        if waiting and not failed:
            outcome[waiting.pop(0)] = end  # it brought the launch down before every rank could report
        elif code != 0 and not failed:
            outcome["leaving"] = end  # every check passed, but the job did not end well
    return outcome


def _together(ranks: list[str | None]) -> str | None:
    """The result of a check, from those of each rank."""
    if all(isinstance(rank, Skipped) for rank in ranks):
        return ranks[0]
    said = [f"skipped: {rank}" if isinstance(rank, Skipped) else rank for rank in ranks]
    return "\n".join(f"rank {rank}:\n{words}" for rank, words in enumerate(said) if words) or None


def _launch(configuration: Configuration, names: list[str]) -> tuple[list[dict[str, str | None]], str, int]:
    """(check -> error, for each rank; how the launch ended, in words and as a code)."""
    with tempfile.TemporaryDirectory(prefix="unidist-") as folder:
        try:
            # With two ranks as users train, with other numbers also with what UNIDIST_DEBUG compares in between.
            debug = ("UNIDIST_DEBUG", str(int(configuration.world_size != 2)))
            launch = replace(configuration, environment=(*configuration.environment, debug))
            done = launch.start("unidist.testing.rank", configuration.zoo, folder, *names)
            end, code = f"the launch ended with code {done.returncode}:\n{done.stdout[-6000:]}", done.returncode
        except subprocess.TimeoutExpired as hang:
            output = hang.stdout.decode(errors="replace") if isinstance(hang.stdout, bytes) else hang.stdout or ""
            end, code = f"the launch hung for {LAUNCH_TIMEOUT:g} s:\n{output[-6000:]}", -1
        ranks = [_read(Path(folder) / f"rank-{rank}.jsonl") for rank in range(configuration.world_size)]
    return ranks, end, code


def conformance(
    backend: str,
    *,
    zoo: str,
    world_sizes: Sequence[int] = (1, 2, 3),
    servers: int = 0,
    one_launch: bool = False,
    **options: Any,
) -> Callable[..., None]:
    """A pytest test with one case for each check, world size and failure scenario. See the package's docstring.

    `one_launch` leaves out what needs launches of its own (failures, resuming on other world sizes): for the second and
    further modes of a backend, which do not differ there.
    """
    import pytest

    configurations = [Configuration(backend, zoo, size, tuple(options.items()), servers) for size in world_sizes]
    names = [*CHECKS, "leaving", *(() if one_launch else SCENARIOS)]
    cases = [(launch, name) for launch in configurations for name in names]
    if not one_launch:
        smaller = [(launch, size) for launch in configurations for size in world_sizes if size < launch.world_size]
        cases += [(launch, f"{RESUMES} {size}") for launch, size in smaller]

    @pytest.mark.parametrize(("configuration", "name"), cases, ids=[f"{launch}-{name}" for launch, name in cases])
    def test(configuration: Configuration, name: str) -> None:
        if name in SCENARIOS:
            scenario(configuration, name)
        elif name.startswith(RESUMES):
            resume(configuration, int(name.split()[-1]))
        else:
            report(run(configuration).get(name) if name == "leaving" else run(configuration)[name])

    return test


def scenario(configuration: Configuration, name: str) -> None:
    """When the last rank goes wrong, the job ends, with that rank's code, and names it as the cause."""
    code, words = SCENARIOS[name]
    done = configuration.start("unidist.testing.scenario", name)
    assert done.returncode == code, done.stdout
    first = next(line for line in done.stdout.splitlines() if "failed first" in line)
    assert f"worker {configuration.world_size - 1} " in first, done.stdout
    assert words in done.stdout[done.stdout.index("failed first") :], done.stdout


def resume(configuration: Configuration, size: int) -> None:
    """Stopped in mid-epoch, a run goes on with another number of ranks: same samples, same curve."""
    with tempfile.TemporaryDirectory(prefix="unidist-") as folder:
        for part, where in (("whole", size), ("first", configuration.world_size), ("second", size)):
            done = replace(configuration, world_size=where).start(
                "unidist.testing.resume", configuration.zoo, folder, part
            )
            assert done.returncode == 0, done.stdout
        whole, resumed = (json.loads((Path(folder) / f"{part}.json").read_text()) for part in ("whole", "second"))
    close(resumed, whole, tolerance=1e-5)


def _read(path: Path) -> dict[str, str | None]:
    if not path.exists():
        return {}
    results = map(json.loads, path.read_text().splitlines())
    return {r["check"]: r["error"] if r["skipped"] is None else Skipped(r["skipped"]) for r in results}

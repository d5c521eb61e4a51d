"""A rank that is killed in mid-training is the first thing that every survivor names: on each engine, under each
launcher that is not ours. torchrun has its workers on one host, where it ends the others at once; srun, which leaves
them alone, and mpirun have theirs on three."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hosts import MPI, SLURM, Hosts, Started, outcome, why_not

from unidist.launch.environments import interpreter_for

WORKERS = 3
GONE = 60.0  # seconds; the servers of meetings and the keepers of connections outlive their ranks a little

SCRIPT = """
import importlib, itertools, os, pathlib, signal, socket, sys
import unidist
from unidist.testing import reference

with unidist.Strategy({backend!r}, timeout=120, **{options}) as strategy:
    zoo = importlib.import_module(f"unidist_{{strategy.framework}}.zoo")
    model, optimizer = strategy.prepare(zoo.mlp(), unidist.SGD(0.1))
    step = strategy.train_step(model, optimizer, zoo.cross_entropy)
    loader = strategy.loader(reference.data(24), per_device_batch=4)
    sys.stderr.write("training\\n")
    for epoch in itertools.count():
        for x, y in loader:
            step(x, y)
        if epoch == 5 and strategy.rank == {victim}:
            pathlib.Path({note!r}).write_text(f"rank {{strategy.rank}} on {{socket.gethostname()}}")
            os.kill(os.getpid(), signal.SIGKILL)
"""


@dataclass(frozen=True)
class Engine:
    backend: str
    options: dict[str, str] = field(default_factory=dict)
    services: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "-".join([self.backend, *self.options.values()])


ENGINES = (
    Engine("torch"),
    Engine("horovod"),
    Engine("horovod", {"framework": "mxnet"}),
    Engine("oneflow"),
    Engine("mxnet", services=("scheduler", "server")),
)
# Rank 0, which has the meeting's server beside it, is killed in every other one: on each engine, under each launcher.
CELLS = [
    (launcher, engine, (row + column) % 2)
    for row, launcher in enumerate(("torchrun", "srun", "mpirun"))
    for column, engine in enumerate(ENGINES)
    # torchrun starts the same command with the same variables everywhere: no scheduler, no server.
    if not (launcher == "torchrun" and engine.services)
]
NAMES = {"scheduler": "the scheduler", "server": "server 0"}
# What services say at the start; workers then say that they are training.
START = re.compile(r"unidist \d|unidist: .* waits at ")
NATIVE = re.compile(r"Traceback|[Ss]tack trace|Check fail|terminate called|Aborted|Segmentation fault")


class Job:
    """Three workers, and what the engine needs beside them. The launcher keeps the output of each by itself, in files
    whose names begin with stdout and stderr."""

    def __init__(self, hosts: Hosts, folder: Path, engine: Engine) -> None:
        self._hosts, self._folder, self._engine = hosts, folder, engine
        self._python, variables = interpreter_for(engine.backend)
        variables |= {"OMP_NUM_THREADS": "1", "UNIDIST_SECRET": "ours"}
        self._env = ["env", *(f"{name}={value}" for name, value in variables.items())]  # mpirun passes little on

    def _process(self, role: str = "worker") -> list[str]:
        place = {"DMLC_PS_ROOT_URI": "h0", "DMLC_PS_ROOT_PORT": 9091, "DMLC_NUM_SERVER": 1, "DMLC_NUM_WORKER": WORKERS}
        roles = [f"{name}={value}" for name, value in {"DMLC_ROLE": role, **place}.items()]
        return [*self._env, *(roles if self._engine.services else []), self._python, str(self._folder / "train.py")]

    def torchrun(self) -> list[str]:
        python, _ = interpreter_for("torch")  # OneFlow's has no torchrun
        launch = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}", "--no-python"]
        return [*launch, "--redirects=3", f"--log-dir={self._folder / 'logs'}", *self._process()]

    def srun(self) -> list[str]:
        roles = [*self._engine.services, *["worker"] * WORKERS]
        programs = [f"{task} {' '.join(self._process(role))}\n" for task, role in enumerate(roles)]
        (self._folder / "programs").write_text("".join(programs))
        output = [f"--output={self._folder}/logs/stdout%t", f"--error={self._folder}/logs/stderr%t"]
        return ["srun", "-N3", f"-n{len(roles)}", *output, "--multi-prog", str(self._folder / "programs")]

    def mpirun(self) -> list[str]:
        services = [part for role in self._engine.services for part in ("-np", "1", *self._process(role), ":")]
        output = ["--output-filename", f"{self._folder}/logs:nocopy"]
        launch = [*self._hosts.mpirun(1), *output, "-x", "MASTER_ADDR=h0"]
        return [*launch, *services, "-np", str(WORKERS), *self._process()]


@pytest.fixture
def started() -> Iterator[Started]:
    kept = Started()
    yield kept
    kept.close()


@pytest.mark.parametrize(("launcher", "engine", "victim"), CELLS, ids=str)
def test_survivors_name_it(
    hosts: Hosts, tmp_path: Path, started: Started, launcher: str, engine: Engine, victim: int
) -> None:
    if reason := why_not(*{"srun": SLURM, "mpirun": MPI}.get(launcher, ())):
        pytest.skip(reason)
    env = hosts.slurm() if launcher == "srun" else {}
    before, note, logs = hosts.processes(), tmp_path / "killed", tmp_path / "logs"
    script = SCRIPT.format(backend=engine.backend, options=engine.options, victim=victim, note=str(note))
    (tmp_path / "train.py").write_text(script)
    logs.mkdir()
    command = getattr(Job(hosts, tmp_path, engine), launcher)()
    [(code, _, told)] = outcome(started.keep(hosts[0].start(command, env=env)))
    said = [path.read_text() for path in logs.rglob("std*")]
    assert code != 0, told
    assert note.exists(), (told, said)
    afterwards = [each.rpartition("training\n")[2].splitlines() for each in said]
    own = [[line for line in each if line.startswith("unidist") and not START.match(line)] for each in afterwards]
    pattern = rf"unidist: PeerFailed: {note.read_text()}: ended in mid-training .*; (.*) on h\d ends with it"
    survivors = [re.fullmatch(pattern, each[0]) for each in own if each]
    assert all(survivors), (told, said)
    expected = [f"rank {rank}" for rank in range(WORKERS) if rank != victim] + [NAMES[each] for each in engine.services]
    assert sorted(each[1] for each in survivors if each) == sorted(expected), (told, said)
    assert not any(NATIVE.search(each) for each in said), (told, said)
    until = time.monotonic() + GONE
    while (left := hosts.processes() - before) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left

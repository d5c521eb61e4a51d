"""OneFlow over several hosts that are described by a list of machines, as its users know it: same script, no ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hosts import MPI, SLURM, Hosts, Started, curve, outcome, why_not

from project import CURVE
from unidist.launch.environments import interpreter_for

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 120.0
MACHINE = '[{"addr": "10.77.0.1"}, {"addr": "10.77.0.2"}]'

SCRIPT = """
import sys
sys.path.insert(0, {examples!r})
import train
import unidist

make = unidist.Strategy
unidist.Strategy = lambda: make("oneflow", machine={machine}, ctrl_port=9988, device="cpu", **{options})
sys.argv = ["train.py", "--epochs", "{epochs}"]
train.main()
"""


class Nodes(Started):
    def __init__(self, hosts: Hosts, folder: Path) -> None:
        super().__init__()
        self._hosts, self._folder = hosts, folder
        self._python, variables = interpreter_for("oneflow")
        # Nobody is at that address: connections between the hosts must not go there.
        proxies = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://10.77.0.99:3128")
        self._env = {**variables, **proxies, "OMP_NUM_THREADS": "1", "UNIDIST_SECRET": "of these tests"}

    def script(self, name: str = "train.py", machine: str = MACHINE, epochs: int = 2, **options: object) -> Path:
        path = self._folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(SCRIPT.format(examples=str(ROOT / "examples"), machine=machine, options=options, epochs=epochs))
        return path

    def start(self, node: int, script: Path, **variables: object) -> subprocess.Popen[str]:
        env = {**self._env, **{name: str(value) for name, value in variables.items()}}
        return self.keep(self._hosts[node].start([self._python, str(script)], env=env))

    def launch(self, launcher: list[str], script: Path, env: Mapping[str, str]) -> subprocess.Popen[str]:
        """By a launcher that is not ours, and passes little of its environment on."""
        forward = ["env", *(f"{name}={value}" for name, value in self._env.items())]
        return self.keep(self._hosts[0].start([*launcher, *forward, self._python, str(script)], env=env))

    def run(self, node: int, command: list[str]) -> subprocess.Popen[str]:
        return self.keep(self._hosts[node].start(command))

    def unidist_run(self, node: int, *arguments: str) -> subprocess.Popen[str]:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "unidist", "run", "--backend", "oneflow", *arguments]
        return self.keep(self._hosts[node].start(command, env={"OMP_NUM_THREADS": "1", "PYTHONPATH": path}))


@pytest.fixture
def nodes(hosts: Hosts, tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(hosts, tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("view", ["mirrored", "consistent"])
def test_two_hosts_train_the_example(nodes: Nodes, view: str) -> None:
    script = nodes.script(view=view)
    master, other = outcome(nodes.start(0, script), nodes.start(1, script))
    assert master[0] == other[0] == 0, (master, other)
    assert curve(master[1]) == pytest.approx(CURVE, abs=1e-4)
    assert other[1] == ""
    assert "node 0 (10.77.0.1) prints" in other[2]
    assert "logs of this node are in" in other[2]


def test_two_hosts_with_two_processes_each(nodes: Nodes) -> None:
    """The script is started once on each host, and starts the others itself."""
    script = nodes.script(gpu_device_num=2)
    master, other = outcome(nodes.start(0, script), nodes.start(1, script))
    assert master[0] == other[0] == 0, (master, other)
    assert curve(master[1]) == pytest.approx(CURVE, abs=1e-4)


def test_unidist_run_on_both_hosts(nodes: Nodes) -> None:
    arguments = ["--machine", "10.77.0.1,10.77.0.2", "--ctrl-port", "9988", str(ROOT / "examples/train.py")]
    master, other = outcome(*(nodes.unidist_run(node, *arguments, "--epochs", "2") for node in range(2)))
    assert master[0] == other[0] == 0, (master, other)
    assert curve(master[1]) == pytest.approx(CURVE, abs=1e-4)


def test_a_host_that_is_not_in_the_list(nodes: Nodes) -> None:
    [(code, _, said)] = outcome(nodes.start(2, nodes.script()))
    assert code != 0
    assert "machine lists 10.77.0.1, 10.77.0.2; this host (h2) has 10.77.0.3, 127.0.0.1: none of them match" in said


def test_lists_in_another_order(nodes: Nodes) -> None:
    swapped = '[{"addr": "10.77.0.2"}, {"addr": "10.77.0.1"}]'
    one, other = nodes.script("a/train.py", timeout=60.0), nodes.script("b/train.py", machine=swapped, timeout=60.0)
    for code, _, said in outcome(nodes.start(0, one), nodes.start(1, other)):
        assert code != 0
        assert re.search("two processes say they are rank 0, .*the options differs: machine=", said), said


RELAY = """
import asyncio

async def pass_on(reader, writer):
    while data := await reader.read(1 << 16):
        writer.write(data)
    writer.close()

async def connected(reader, writer):
    try:
        there = await asyncio.open_connection("10.77.0.1", 9988)
    except OSError:
        return writer.close()
    await asyncio.gather(pass_on(reader, there[1]), pass_on(there[0], writer))

async def main():
    async with await asyncio.start_server(connected, "10.77.0.3", 9988) as server:
        await server.serve_forever()

asyncio.run(main())
"""


def test_only_ctrl_port_is_mapped_out_of_a_container(nodes: Nodes) -> None:
    """h0 is the container, on h2, which is in the list and passes on what comes to ctrl_port, before h0 listens too."""
    nodes.run(2, [sys.executable, "-c", RELAY])
    arguments = ["--machine", "10.77.0.3,10.77.0.2", "--ctrl-port", "9988"]
    other = nodes.unidist_run(1, *arguments, str(ROOT / "examples/train.py"))
    master = nodes.unidist_run(0, *arguments, "--node-rank", "0", str(ROOT / "examples/train.py"))
    for code, _, said in outcome(master, other):
        assert code == 1, said
        assert re.search(r"rank 0 on h0 cannot reach rank 1 on h1 at 10\.77\.0\.3, port \d+", said), said
        assert "mapping ports by -p is not enough" in said


def test_a_host_that_dies_ends_the_others(nodes: Nodes, hosts: Hosts) -> None:
    """Its cable is pulled in the middle of training: no goodbye, no reset."""
    script = nodes.script(epochs=10000)
    master, other = nodes.start(0, script), nodes.start(1, script)
    assert master.stdout is not None
    while "epoch 1" not in (line := master.stdout.readline()):
        assert line, master.communicate()
    hosts.cut(1)
    try:
        for code, _, said in outcome(master, other):
            assert code == 1, said
            assert "PeerFailed" in said
    finally:
        hosts.heal(1)


PLAIN = """
import os
import sys
import unidist

with unidist.Strategy("oneflow", timeout={timeout}, device="cpu") as strategy:
    for step in range({steps}):
        strategy.all_reduce(step, "sum")
        if step == 3 and strategy.rank == 1:
            {last}
    strategy.print("ranks", strategy.all_gather(strategy.rank))
"""


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
@pytest.mark.parametrize(
    ("last", "said"),
    [
        ("os._exit(0)", "ended in mid-training"),
        ("sys.exit(0)", r"sys\.exit\(0\) has left its Strategy"),
        ("raise KeyError('what is wrong')", "KeyError: 'what is wrong'"),
    ],
    ids=["_exit", "exit", "raised"],
)
def test_a_rank_that_is_gone_is_named_first(nodes: Nodes, hosts: Hosts, launcher: str, last: str, said: str) -> None:
    if reason := why_not(*(SLURM if launcher == "srun" else MPI)):
        pytest.skip(reason)
    script = nodes.script()
    script.write_text(PLAIN.format(timeout=60, steps=10**9, last=last))
    srun = ["srun", "-N2", "-n2"]
    mpirun = [*hosts.mpirun(1), "-np", "2", "-x", "MASTER_ADDR=h0"]
    command, env = (srun, hosts.slurm()) if launcher == "srun" else (mpirun, {})
    [(code, _, told)] = outcome(nodes.launch(command, script, env))
    assert code != 0, told
    lines = [line for line in told.splitlines() if "rank 0 on h0 ends with it" in line]
    assert lines, told
    assert re.search(f"unidist: PeerFailed: rank 1 on h1: {said}", lines[0]), told
    assert "Check failure stack trace" not in told


@pytest.mark.parametrize(
    ("master", "place", "words"),
    [
        ("10.77.0.99", 1, r"no way leads from h1 to 10\.77\.0\.99|no answer comes back from 10\.77\.0\.99"),
        ("no-such-host.invalid", 1, "which h1 cannot resolve"),
        ("localhost", 1, "localhost is always the own host"),
        ("10.77.0.99", 0, "rank 1 of 2 did not come"),
    ],
)
def test_a_master_that_is_not_there(nodes: Nodes, master: str, place: int, words: str) -> None:
    script = nodes.script()
    script.write_text(PLAIN.format(timeout=5, steps=1, last="pass"))
    [(code, _, said)] = outcome(
        nodes.start(place, script, MASTER_ADDR=master, MASTER_PORT=9988, WORLD_SIZE=2, RANK=place)
    )
    assert code == 1
    assert re.search(words, said), said


def test_a_master_that_knows_itself_as_localhost(nodes: Nodes) -> None:
    """As Kubeflow's operators tell the master's pod."""
    script = nodes.script()
    script.write_text(PLAIN.format(timeout=60, steps=4, last="pass"))
    place = {"MASTER_PORT": 9988, "WORLD_SIZE": 2}
    first = nodes.start(0, script, MASTER_ADDR="localhost", RANK=0, **place)
    (code, said, told), other = outcome(first, nodes.start(1, script, MASTER_ADDR="h0", RANK=1, **place))
    assert code == other[0] == 0, (told, other)
    assert said == "ranks [0, 1]\n"

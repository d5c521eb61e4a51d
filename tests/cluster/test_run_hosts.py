"""`unidist run` on several hosts at once, by somebody else's launcher: one job, or none."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from hosts import MPI, SLURM, Hosts, why_not

from project import ROOT


@pytest.mark.parametrize("way", ["srun", "mpirun"])
def test_one_job_for_each_host_is_refused(hosts: Hosts, tmp_path: Path, way: str) -> None:
    if reason := why_not(*(SLURM if way == "srun" else MPI)):
        pytest.skip(reason)
    script = tmp_path / "train.py"
    script.write_text("import os; print('trained', os.environ['RANK'])")
    launcher = ["srun", "-N3", "-n3"] if way == "srun" else [*hosts.mpirun(1), "-x", "PYTHONPATH", "-np", "3"]
    run = [*launcher, sys.executable, "-m", "unidist", "run", "--backend=torch"]
    env = {"PYTHONPATH": str(ROOT), **(hosts.slurm() if way == "srun" else {})}
    refused = hosts[0].run([*run, str(script)], env=env)
    assert refused.returncode != 0
    assert "trained" not in refused.stdout
    assert f"{way} has started it in 3 places" in refused.stderr
    assert f"`{way} … python {script}`" in refused.stderr
    alone = hosts[0].run([*run, "--standalone", str(script)], env=env)
    assert alone.stdout.count("trained 0") == 3, alone.stderr


def test_the_batch_script_of_slurm_may_run(hosts: Hosts, tmp_path: Path) -> None:
    """Its one process is on the first host of the allocation; only srun starts more."""
    if reason := why_not(*SLURM, "sbatch"):
        pytest.skip(reason)
    script, output = tmp_path / "train.py", tmp_path / "output"
    script.write_text("import os; print('trained', os.environ['RANK'], os.environ['SLURM_NTASKS'])")
    run = shlex.join([sys.executable, "-m", "unidist", "run", "--backend=torch", "--nproc=2", str(script)])
    env = {"PYTHONPATH": str(ROOT), **hosts.slurm()}
    ended = hosts[0].run(["sbatch", "--wait", "-N3", "-n6", f"--output={output}", f"--wrap={run}"], env=env)
    assert ended.returncode == 0, ended.stderr + output.read_text()
    said = output.read_text()
    assert sorted(line for line in said.splitlines() if "trained" in line) == [
        "[worker 0] trained 0 6",
        "[worker 1] trained 1 6",
    ], said

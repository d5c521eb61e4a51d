"""Another launcher may have started `unidist run` itself, once for each of its nodes or ranks.

Every one of them would train a job of its own, without a word: `inherited` drops the variables that tell them apart.
"""

from __future__ import annotations

from collections.abc import Mapping

from unidist import registry
from unidist.errors import UsageError, WorldError
from unidist.world import tasks_per_node
from unidist.world.launcher import Outer, number_in


def refuse_several(env: Mapping[str, str], script: str, alone: str) -> None:
    """Unless this process is the only one that its launcher has started. `alone` says how to overrule that."""
    if env.get("UNIDIST_RANK"):
        return  # a job inside a job of ours: somebody meant it
    launchers = [plugin.launcher for plugin in registry.loadable() if plugin.launcher]
    for outer in (_TORCHRUN, *launchers, *_OUTERS):
        if not env.get(outer.marker) or (outer.marker == "WORLD_SIZE" and env.get("PET_NNODES")):
            continue  # WORLD_SIZE counts the processes inside a pod, too
        count = outer.count(env)
        if count > 1:
            seen = ", ".join(f"{name}={env[name]}" for name in outer.shown if env.get(name))
            raise UsageError(
                f"this command starts a job on this machine alone, and {outer.name} has started it in {count} places "
                f"({seen}): each would train by itself. Start the script directly instead: "
                f"{outer.instead.format(script=script)}. Where these variables are not meant for this job, {alone}."
            )


def _tasks(env: Mapping[str, str]) -> int:
    """Of this step. The batch script itself has the sizes of the job only, and is started once."""
    try:
        return sum(tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", "")))
    except WorldError:
        return 0


_MASTER = ("MASTER_ADDR", "MASTER_PORT")
_TORCHRUN = Outer(
    "torchrun", "TORCHELASTIC_RUN_ID", number_in("WORLD_SIZE"),
    ("TORCHELASTIC_RUN_ID", "WORLD_SIZE", "RANK", *_MASTER), "`torchrun … {script}`",
)  # fmt: skip
_OUTERS = (
    Outer(
        "mpirun", "OMPI_COMM_WORLD_RANK", number_in("OMPI_COMM_WORLD_SIZE"),
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), "`mpirun … python {script}`",
    ),
    Outer(
        "srun", "SLURM_STEP_ID", _tasks,
        ("SLURM_STEP_ID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST", "SLURM_PROCID"),
        "`srun … python {script}`",
    ),
    Outer(
        "Kubeflow", "PET_NNODES", number_in("PET_NNODES"),
        ("PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE", "PET_MASTER_ADDR", *_MASTER),
        "`python {script}` in each pod, or `torchrun {script}` for several processes in each",
    ),
    Outer(
        "another launcher", "WORLD_SIZE", number_in("WORLD_SIZE"),
        ("WORLD_SIZE", "RANK", *_MASTER), "`python {script}` in each of them",
    ),
)  # fmt: skip

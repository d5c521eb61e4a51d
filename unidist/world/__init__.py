"""Who am I, and who else is there: `World`, and how it is found in each cluster environment.

The first of these that applies wins, and `World.source` and `World.reason` say which and why:

 1. arguments    `init=`, `rank=`, `world_size=`
 2. unidist      UNIDIST_RANK, UNIDIST_WORLD_SIZE: `unidist run`
 3. torchrun     TORCHELASTIC_RUN_ID: torchrun, `python -m torch.distributed.launch`
 4. the engines' own launchers, as the plug-ins declare them, by the names of the backends
 5. openmpi      OMPI_COMM_WORLD_RANK: mpirun, Kubeflow MPIJob
 6. slurm        SLURM_STEP_ID with the step's sizes: a task of srun, not the batch script
 7. kubeflow     PET_NNODES or PET_NODE_RANK without LOCAL_RANK: a PyTorchJob or TrainJob pod
 8. environment  RANK, WORLD_SIZE: anything else that follows torch's env://
 9. none         one process

An inner launcher comes before the outer one it may run inside: mpirun starts its daemons through srun.
An environment that is recognised but partial, or contradicts itself, is an error; it is never skipped.
"""

from unidist.world.detection import detect
from unidist.world.slurm import expand_hostlist, tasks_per_node
from unidist.world.world import World

__all__ = ["World", "detect", "expand_hostlist", "tasks_per_node"]

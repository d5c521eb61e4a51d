"""What `unidist bench launch --backend horovod` starts: as little as possible up to the first all-reduce."""

from pathlib import Path

from unidist.plugin import Start, natively_or_by_strategy

# Under `unidist run` it is Strategy that tells Horovod where the others are.
FIRST_COLLECTIVE = natively_or_by_strategy("""\
import horovod.torch as hvd
import torch
hvd.init()
rank, size, total = hvd.rank(), hvd.size(), hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
""")


def starts(python: str, script: str, nproc: int, port: int) -> dict[str, list[Start]]:
    """By hand there would be a server to write, for the ranks to find each other."""
    horovodrun = [python, str(Path(python).with_name("horovodrun")), "--gloo", "-np", str(nproc)]
    return {"horovodrun": [([*horovodrun, python, script], {})]}

"""What `unidist bench launch --backend torch` starts: as little as possible up to the first all-reduce."""

from unidist.plugin import Start, ranks_by_hand

FIRST_COLLECTIVE = """\
import time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
assert value.item() == dist.get_world_size()
if dist.get_rank() == 0:
    print("FIRST", time.time(), flush=True)
dist.destroy_process_group()
"""


def starts(python: str, script: str, nproc: int, port: int) -> dict[str, list[Start]]:
    torchrun = [python, "-m", "torch.distributed.run", f"--nproc-per-node={nproc}", f"--master-port={port}"]
    return {"by hand": ranks_by_hand([python, script], nproc, port), "torchrun": [([*torchrun, script], {})]}

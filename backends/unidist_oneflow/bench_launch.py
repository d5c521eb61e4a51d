"""What `unidist bench launch --backend oneflow` starts: as little as possible up to the first all-reduce."""

from unidist.plugin import Start, natively_or_by_strategy, ranks_by_hand

# Under `unidist run` by Strategy, which knows that whoever imports OneFlow before rank 0 waits for ten seconds.
FIRST_COLLECTIVE = natively_or_by_strategy("""\
import oneflow as flow
value = flow.ones(1)
flow.comm.all_reduce(value)
rank, size, total = flow.env.get_rank(), flow.env.get_world_size(), value.numpy()[0]
""")


def starts(python: str, script: str, nproc: int, port: int) -> dict[str, list[Start]]:
    command = [python, "-m", "oneflow.distributed.launch", f"--nproc_per_node={nproc}", f"--master_port={port}", script]
    return {"by hand": ranks_by_hand([python, script], nproc, port), "its launcher": [(command, {})]}

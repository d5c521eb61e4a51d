"""What `unidist bench launch --backend mxnet` starts: as little as possible up to the first sum on a server."""

from unidist.plugin import Start

# To import mxnet as a scheduler or server is to serve until the workers have ended.
FIRST_COLLECTIVE = """\
import time
import mxnet as mx
store = mx.kv.create("dist_sync")
value = mx.nd.ones(1)
store.init(0, value * 0)
store.push(0, value)
store.pull(0, value)
assert value.asscalar() == store.num_workers
if store.rank == 0:
    print("FIRST", time.time(), flush=True)
"""


def starts(python: str, script: str, nproc: int, port: int) -> dict[str, list[Start]]:
    """MXNet's launch.py is not in its wheel."""
    cluster = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NODE_HOST": "127.0.0.1",
        "DMLC_NUM_SERVER": "1",
        "DMLC_NUM_WORKER": str(nproc),
    }
    roles = ["scheduler", "server", *["worker"] * nproc]
    return {"by hand": [([python, script], {**cluster, "DMLC_ROLE": role}) for role in roles]}

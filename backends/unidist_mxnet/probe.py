"""A scheduler, a server and two workers sum an array in a KVStore. Run by `unidist setup`."""

import importlib
import os
import socket
import subprocess
import sys


def main() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {
        **os.environ,
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NODE_HOST": "127.0.0.1",
        "DMLC_NUM_SERVER": "1",
        "DMLC_NUM_WORKER": "2",
    }
    command = [sys.executable, "-I", os.path.abspath(__file__)]
    started = [
        subprocess.Popen(command, env={**env, "DMLC_ROLE": role})
        for role in ("scheduler", "server", "worker", "worker")
    ]
    return max(abs(process.wait()) for process in started)


def role() -> None:
    mxnet = importlib.import_module("mxnet")  # a scheduler or server serves inside this import, and ends with the job
    store = mxnet.kv.create("dist_sync")
    total = mxnet.nd.zeros(3)
    store.init(0, total)
    store.push(0, mxnet.nd.ones(3) * (store.rank + 1))
    store.pull(0, out=total)
    assert total.asnumpy().tolist() == [3.0] * 3, total


if __name__ == "__main__":
    if "DMLC_ROLE" in os.environ:
        role()
    else:
        sys.exit(main())

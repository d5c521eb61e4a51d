"""Two processes sum a tensor in OneFlow. Run by `unidist setup`."""

import importlib
import os
import socket
import subprocess
import sys


def main() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    command = [sys.executable, "-I", os.path.abspath(__file__), "rank"]
    started = [subprocess.Popen(command, env={**env, "RANK": str(n), "LOCAL_RANK": str(n)}) for n in range(2)]
    return max(abs(process.wait()) for process in started)


def rank() -> None:
    flow = importlib.import_module("oneflow")  # meets the other rank here
    tensor = flow.ones(3) * (flow.env.get_rank() + 1)
    flow.comm.all_reduce(tensor)
    assert tensor.numpy().tolist() == [3.0] * 3, tensor


if __name__ == "__main__":
    if sys.argv[1:] == ["rank"]:
        rank()
    else:
        sys.exit(main())

"""Two processes sum a tensor over Horovod's gloo, from torch and from MXNet. Run by `unidist setup`."""

import importlib
import os
import subprocess
import sys


def main() -> int:
    launcher = [sys.executable, "-m", "horovod.runner.launch", "--gloo", "-np", "2"]
    for framework in ("torch", "mxnet"):
        code = subprocess.call([*launcher, sys.executable, "-I", os.path.abspath(__file__), framework])
        if code:
            return code
    return 0


def rank(framework: str) -> None:
    # `import horovod.torch` succeeds without its native library; calling it does not.
    horovod = importlib.import_module(f"horovod.{framework}")
    horovod.init()
    native = importlib.import_module(framework)
    ones = native.ones(3) if framework == "torch" else native.nd.ones(3)
    total = horovod.allreduce(ones * (horovod.rank() + 1), average=False)
    values = total.numpy() if framework == "torch" else total.asnumpy()
    assert values.tolist() == [3.0] * 3, values
    horovod.shutdown()


if __name__ == "__main__":
    if sys.argv[1:]:
        rank(sys.argv[1])
    else:
        sys.exit(main())

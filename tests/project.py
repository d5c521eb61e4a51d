"""What many tests share: where the checkout is, free ports, and what the example prints."""

import socket
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# The losses that examples/train.py prints for two epochs, on every backend.
CURVE = [2.232611, 1.444966]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

"""What runs in the process that `host` starts beside rank 0.

All ranks wait for it to start, so this module and those that it imports do without dataclasses, pathlib and subprocess,
whose imports alone would take as long as everything else here; a test in test_imports.py looks.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
import time

from unidist import network
from unidist.control.server import ControlServer

FAREWELL = 10.0  # seconds that it may outlive rank 0 after a failure, to tell the others
LINGER = 5.0  # seconds that it still listens after a meeting was refused, for those who come late to it
WIDEN_AFTER = 3.0  # seconds after which a master that is known as localhost also listens to other hosts


def main() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2**16)), hard))  # a file for each rank
    line = socket.socket(fileno=int(sys.argv[1]))
    settings = json.loads(line.makefile("rb").readline())
    listeners = [socket.socket(fileno=fd) for fd in settings["fds"]]
    server = ControlServer(
        "", token=settings["secret"], listeners=listeners, job=settings["job"], generation=settings["generation"]
    )
    port, ended = listeners[0].getsockname()[1], 0.0

    def told() -> None:
        nonlocal ended
        if line.recv(1):
            server.stop_listening()
            line.sendall(b"r")
        else:  # rank 0 has closed its Strategy, or is gone
            if not server.refused:
                server.stop_listening()
            server.forget(line)
            ended = time.monotonic()
            for after in (LINGER, FAREWELL):
                server.later(after, lambda: None)

    def widen() -> None:
        if not server.met:
            server.listen_too(
                [address for address in network.addresses().values() if not network.is_loopback(address)], port
            )

    server.watch(line, told)
    if settings["widen"]:
        server.later(WIDEN_AFTER, widen)

    def is_over() -> bool:
        since = time.monotonic() - ended
        if not ended or (server.refused and since < LINGER):
            return False
        server.stop_listening()
        # Rank 0 may have come to the end of its script first: the others have work to finish, and need their lifeline.
        return server.peers == 0 or (server.failed and since > FAREWELL)

    server.serve(until=is_over)
    os._exit(0)

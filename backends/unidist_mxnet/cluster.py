"""What ps-lite leaves out: settings that work without being told, and the end of a job when one of its nodes dies.

Under `unidist run` the supervisor sees every process. Started by hand, nobody does, and ps-lite waits for ever. So the
scheduler looks at the heartbeats of all nodes; when one is missing it leaves, and answers on its port with the cause
for a while; every other node looks at that port once a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unidist.world import World

LOOK_EVERY = 1.0
MISSES = 3  # looks in a row: the scheduler may leave a moment before the others when all is well
SILENCE = 5  # seconds without a heartbeat until a node counts as dead, if heartbeats come each second
OBITUARY_FOR = 5.0  # seconds during which the cause can be read
PATIENCE = 300.0  # seconds for which a server waits for the scheduler to come
OPENING = b"unidist: "  # ZeroMQ opens with 0xff


def with_defaults(env: MutableMapping[str, str]) -> None:
    """Complete DMLC_*, before the library reads it."""
    env.setdefault("PS_HEARTBEAT_INTERVAL", "1")
    env.setdefault("PS_HEARTBEAT_TIMEOUT", str(silence(env)))
    uri = env.get("DMLC_PS_ROOT_URI", "")
    if "DMLC_NODE_HOST" not in env and "DMLC_INTERFACE" not in env and uri:
        # ps-lite would take the first interface it finds, which the others need not reach, and dies when there is none.
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((socket.gethostbyname(uri), 9))  # sends nothing: asks the kernel which interface leads there
            env["DMLC_NODE_HOST"] = probe.getsockname()[0]


def silence(env: Mapping[str, str]) -> int:
    """Seconds until a node counts as dead; 0 if that cannot be known, since no heartbeat is sent."""
    interval = int(env["PS_HEARTBEAT_INTERVAL"])
    asked = int(env.get("PS_HEARTBEAT_TIMEOUT") or 0)
    return max(asked or SILENCE, 3 * interval) if interval > 0 else 0


def with_neighbours(world: World, hosts: list[str]) -> World:
    """Complete what DMLC_* leaves open: who shares a host. `hosts` holds the name of each rank's."""
    if world.local_rank >= 0 and world.num_nodes > 0 and world.local_world_size > 0:
        return world
    here = [rank for rank, host in enumerate(hosts) if host == hosts[world.rank]]
    nodes = list(dict.fromkeys(hosts))
    return dataclasses.replace(
        world,
        local_rank=here.index(world.rank),
        local_world_size=len(here),
        node_rank=nodes.index(hosts[world.rank]),
        num_nodes=len(nodes),
    )


class Lookout:
    """A context in which this process ends, with the cause if it can be had, when the scheduler is gone."""

    def __init__(self, world: World, met: bool) -> None:
        self._met = met  # it has been there; a server may come before it
        self._address = (world.master_addr, world.master_port)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="unidist-lookout", daemon=True)

    def __enter__(self) -> Lookout:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()

    def _watch(self) -> None:
        misses, begun = 0, time.monotonic()
        name = f"the scheduler at {self._address[0]}:{self._address[1]}"
        while not self._stop.wait(LOOK_EVERY if self._met else LOOK_EVERY / 10):
            heard = self._look()
            self._met, misses = self._met or bool(heard), 0 if heard else misses + 1
            if heard.startswith(OPENING):
                self._end(heard[len(OPENING) :].decode(errors="replace").strip())
            if self._met and misses >= MISSES:
                self._end(f"{name} is gone: see its log for the cause")
            if not self._met and time.monotonic() > begun + PATIENCE:
                self._end(f"{name} did not come within {PATIENCE:g} s: is it started, and is the address right?")

    def _look(self) -> bytes:
        try:
            with socket.create_connection(self._address, timeout=LOOK_EVERY) as wire:
                wire.settimeout(LOOK_EVERY)
                try:
                    return wire.recv(4096) or b"?"
                except TimeoutError:
                    return b"?"  # busy, but somebody listens
        except OSError:
            return b""

    def _end(self, cause: str) -> None:
        if not self._stop.is_set():
            sys.stderr.write(f"unidist: PeerFailed: {cause}\n")
            sys.stderr.flush()
            os._exit(1)


# -- the scheduler's side --------------------------------------------------------------------------------------


def watch_over_nodes(library: ctypes.CDLL, store: ctypes.c_void_p, world: World) -> None:
    """From a thread, since the main one is about to enter the library and stay there."""
    patience = silence(os.environ)
    if not patience:
        return
    workers, servers = world.world_size, int(os.environ["DMLC_NUM_SERVER"])
    nodes = {9 + 2 * rank: f"worker {rank}" for rank in range(workers)}  # ps-lite's own numbers
    nodes |= {8 + 2 * rank: f"server {rank}" for rank in range(servers)}

    def watch() -> None:
        _wait_until_listening(world)
        seen: dict[int, int] = dict.fromkeys(nodes, 0)
        while True:
            time.sleep(LOOK_EVERY)
            for node in nodes:
                dead = ctypes.c_int()
                library.MXKVStoreGetNumDeadNode(store, node, ctypes.byref(dead), patience)
                seen[node] = seen[node] + 1 if dead.value else 0
            # Before its first heartbeat a node counts as dead too, hence more than one look.
            missing = [nodes[node] for node, times in seen.items() if times >= MISSES]
            if missing:
                _leave(f"{' and '.join(missing)} died: no heartbeat for {patience} s (numbers are ps-lite's)", world)

    threading.Thread(target=watch, name="unidist-nodes", daemon=True).start()


def _wait_until_listening(world: World) -> None:
    """The library crashes when asked about nodes before it has a socket."""
    while True:
        time.sleep(LOOK_EVERY)
        with contextlib.suppress(OSError):
            socket.create_connection((world.master_addr, world.master_port), timeout=LOOK_EVERY).close()
            return


def _leave(cause: str, world: World) -> None:
    sys.stderr.write(f"unidist: the scheduler ends the job: {cause}\n")
    sys.stderr.flush()
    # A new program in this process: the library's sockets close, and the port is free to tell the cause.
    os.execv(sys.executable, [sys.executable, __file__, str(world.master_port), cause])


def tell(port: int, cause: str) -> None:
    """Answer every connection with the cause, for as long as anyone may still ask."""
    until = time.monotonic() + OBITUARY_FOR
    with socket.create_server(("", port), reuse_port=False) as listener:
        while (left := until - time.monotonic()) > 0:
            listener.settimeout(left)
            with contextlib.suppress(OSError):
                wire, _ = listener.accept()
                with wire:
                    wire.sendall(OPENING + cause.encode() + b"\n")


if __name__ == "__main__":
    tell(int(sys.argv[1]), sys.argv[2])
    sys.exit(1)

"""This process's place in OneFlow's cluster: taken once, and kept until the process ends."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from unidist.plugin import StateError, World
from unidist_oneflow import OneFlowOptions, preflight, start
from unidist_oneflow.guard import guarded
from unidist_oneflow.keeper import Keeper, connections
from unidist_oneflow.leaving import Leaving

SLACK = 5.0  # seconds beyond the timeout that OneFlow may take to start


class Cluster:
    """Checks what OneFlow would hang on, though the ranks have met, and brings it up."""

    def __init__(self, world: World, options: OneFlowOptions, on_gpu: bool, timeout: float) -> None:
        if Cluster._joined:
            raise StateError(
                "a process joins OneFlow's cluster only once: do all the work in one Strategy, and close it at the end"
            )
        start.check_not_imported()
        peers = world.peers
        preflight.check_interface(peers, on_gpu)
        with guarded(peers, timeout + SLACK) if peers else nullcontext(bool) as guard_is_there:
            start.preload_libraries()
            guard_is_there()
            if peers is None:  # alone, but OneFlow wants a port nevertheless
                world = replace(world, master_addr="127.0.0.1", master_port=preflight.try_port(0)[0])
            else:
                preflight.check_doors(peers, timeout)
                world = replace(world, master_port=preflight.agree_on_port(world, peers, timeout))
            if world.node_rank > 0 and world.local_rank == 0:
                sys.stderr.write(
                    f"unidist: node {world.node_rank} of {world.num_nodes} computes; node 0 ({world.master_addr}) "
                    f"prints and saves. OneFlow's logs of this node are in {log_folder()}\n"
                )
            graphs = options.view == "consistent"
            others = connections()
            oneflow_exit = start.bring_up(world, graphs, options.verbose, timeout, log_folder())
        self.world = world
        Cluster._joined = True
        launched = peers is not None and peers.launched
        self._leaving = Leaving(peers, Keeper(sorted(connections() - others), launched), oneflow_exit)
        self._leaving.install()

    _joined = False  # by this process

    def leave(self, failed: bool) -> None:
        self._leaving.leaves(failed)


def log_folder() -> Path:
    given = os.environ.get("GLOG_log_dir")  # noqa: SIM112  # its real name
    return Path(given or Path(tempfile.gettempdir()) / f"oneflow-logs-{os.getuid()}")

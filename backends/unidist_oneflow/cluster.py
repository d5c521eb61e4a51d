"""This process's place in OneFlow's cluster: taken once, and kept until the process ends."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from unidist.errors import StateError, WorldError
from unidist.world import World
from unidist_oneflow import OneFlowOptions, start
from unidist_oneflow.leaving import Leaving
from unidist_oneflow.lifeline import Lifeline
from unidist_oneflow.meeting import Meeting
from unidist_oneflow.preflight import check_interface, gather_facts

_joined = False


class Cluster:
    """Meets the other ranks, checks what OneFlow would hang on, and brings it up as `flow`."""

    def __init__(self, world: World, options: OneFlowOptions, on_gpu: bool, timeout: float) -> None:
        global _joined
        if _joined:
            raise StateError(
                "a process joins OneFlow's cluster only once: do all the work in one Strategy, and close it at the end"
            )
        start.check_not_imported()
        self.world = with_meeting_point(world)
        self._lifeline = self._meet(options, on_gpu, timeout)
        guard = self._lifeline.by_another_process(timeout + 5.0) if self._lifeline else nullcontext()
        try:
            with guard:
                graphs = options.view == "consistent"
                self.flow = start.bring_up(self.world, graphs, options.verbose, timeout, log_folder())
        except BaseException as error:
            self._tell(f"{type(error).__name__}: {error}")
            raise
        if self._lifeline:
            self._lifeline.start()
        _joined = True
        self._leaving = Leaving(self._tell)
        self._leaving.install()

    def _meet(self, options: OneFlowOptions, on_gpu: bool, timeout: float) -> Lifeline | None:
        world, machine = self.world, options.machine
        check_interface(world, machine[world.node_rank] if machine else None, on_gpu)
        meeting = Meeting(world, machine, gather_facts(world, machine, options.view, options.graph), timeout)
        if world.num_nodes == 1 and os.environ.get("UNIDIST_TOKEN"):  # one launcher of ours watches all of them
            for wire in meeting.wires.values():
                wire.close()
            return None
        if world.node_rank > 0 and world.local_rank == 0:
            sys.stderr.write(
                f"unidist: node {world.node_rank} of {world.num_nodes} computes; node 0 ({world.master_addr}) prints "
                f"and saves. OneFlow's logs of this node are in {log_folder()}\n"
            )
        return Lifeline(world, meeting.wires, meeting.everyone)

    def _tell(self, why: str) -> None:
        if self._lifeline is not None:
            self._lifeline.tell(why)

    def leave(self, failed: bool) -> None:
        """After a failure the process ends soon, and tells then. Otherwise all ranks have agreed to part."""
        if failed:
            self._leaving.failed()
        elif self._lifeline is not None:
            self._lifeline.close()


def with_meeting_point(world: World) -> World:
    if world.world_size == 1:  # alone, but OneFlow wants a port nevertheless
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            return replace(world, master_addr="127.0.0.1", master_port=free.getsockname()[1])
    if world.master_addr is None or world.master_port is None:
        raise WorldError(
            f"{world.source} does not say where rank 0 is: set MASTER_ADDR and MASTER_PORT for every process, give "
            "machine= and ctrl_port=, or start with `unidist run`"
        )
    return world


def log_folder() -> Path:
    given = os.environ.get("GLOG_log_dir")  # noqa: SIM112  # its real name
    return Path(given or Path(tempfile.gettempdir()) / f"oneflow-logs-{os.getuid()}")

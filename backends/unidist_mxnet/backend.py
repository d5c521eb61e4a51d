"""MXNet KVStore behind the contract of `unidist.backend`."""

from __future__ import annotations

import os
import sys
from typing import Any

import mxnet as mx
from mxnet import nd

from unidist.plugin import UnsupportedOperation, UsageError, World
from unidist_mxnet import MxnetOptions, capabilities, memory
from unidist_mxnet.blocks import check_for_servers, collect
from unidist_mxnet.cluster import HINT
from unidist_mxnet.exchange import Exchange
from unidist_mxnet.late import meet_by_store
from unidist_mxnet.models import MxnetModels
from unidist_mxnet.optimized_model import Optimized
from unidist_mxnet.optimizers import describe, from_spec
from unidist_mxnet.prepared_model import Carried, Trained
from unidist_mxnet.server_model import UpdatedByServer
from unidist_mxnet.store import Store

FOREIGN = f"The scheduler is MXNet's own, which unidist cannot watch. {HINT}"
LAYERWISE = (mx.optimizer.LAMB, mx.optimizer.LARS, mx.optimizer.LBSGD)


class MxnetBackend(MxnetModels):
    store: Store
    exchange: Exchange

    def __init__(self, world: World, options: MxnetOptions, device: str | None, timeout: float) -> None:
        super().__init__(world, options, device, options.devices)
        self.capabilities = capabilities(options, world.world_size)
        store = Store(world, options, self.devices, timeout)
        if store.distributed and world.peers is None:
            self.world = world = meet_by_store(world, options, store, timeout)
        self.carry_by(store, Exchange(world.peers if store.workers > 1 else None, options.collective_timeout))
        # ps-lite numbers the workers in its own way.
        store.rank_0_leads = self.exchange.meet(store.rank)[0] == 0
        self._servers = (
            [service for service in world.peers.services if service["role"] == "server"] if world.peers else []
        )
        if store.distributed:
            self._check_servers()
            if world.peers is not None:
                store.outlast(world.peers)
        self.transport = self._describe_transport()

    def _check_servers(self) -> None:
        """All ranks see the same, so each may raise by itself."""
        if not self._servers:
            if self.options.server_updates:
                raise UsageError(f"update_on='server' needs servers of unidist's. {FOREIGN}")
            if self.world.rank == 0:
                sys.stderr.write(f"unidist: should it or a server die, the workers will wait for ever. {FOREIGN}\n")
            return
        asked = self.options.server_memory
        if asked and any(server["bytes"] != int(asked * memory.GB) for server in self._servers):
            raise UsageError(
                f"server_memory is {asked:g} here, and the servers were not told: say it to `unidist run --option "
                f"server_memory={asked:g}`"
            )
        hosts: dict[str, list[int]] = {}
        for server in self._servers if asked else []:
            hosts.setdefault(server["host"], []).append(server["has"])
        for host, has in hosts.items():
            self._check_memory(memory.granted_too_much(len(has), asked, min(has), host))

    def _check_memory(self, problem: str | None) -> None:
        """Every rank has heard the same of the servers, and so has the same problem."""
        if problem and self.options.server_memory_check == "refuse":
            raise UsageError(problem)
        if problem and self.world.rank == 0:
            sys.stderr.write(f"unidist: {problem}\n")

    def _describe_transport(self) -> str:
        said = f"KVStore {self.store.name}" + (" (chosen)" if self.options.kvstore == "auto" else " (asked for)")
        if self.store.distributed:
            servers = int(os.environ["DMLC_NUM_SERVER"])
            side = "servers" if self.options.server_updates else "workers"
            said += f" with {servers} server{'s' * (servers > 1)}, updates on the {side}"
        if self.devices > 1:
            said += f", {self.devices} devices per worker"
        return said

    def close(self, failed: bool) -> None:
        self.release()
        if not failed:
            self._report_staleness()
            nd.waitall()
            self.exchange.meet()
        self.store.close(failed)

    def _report_staleness(self) -> None:
        on_servers = [prepared for prepared in self._trained.values() if isinstance(prepared, UpdatedByServer)]
        counts = [held.staleness for held in on_servers if held.staleness is not None]
        for count in counts:
            count.settle()
        mine = [sum(e.updates for e in counts), sum(e.total for e in counts), max((e.worst for e in counts), default=0)]
        everyone = self.exchange.meet(mine)
        if self.world.rank == 0 and any(updates for updates, _, _ in everyone):
            said = [f"worker {r} {t / u:.2f} (at most {w})" for r, (u, t, w) in enumerate(everyone) if u]
            sys.stderr.write(f"unidist: updates by others between two of one's own, on average: {', '.join(said)}\n")

    # -- models whose parameters the servers hold

    def check_prepare(self, model: Any, optimizer: Any) -> None:
        super().check_prepare(model, optimizer)
        if optimizer is not None and self._updates_on_servers:
            optimized = [prepared for prepared in self._trained.values() if isinstance(prepared, Optimized)]
            held = {id(parameter) for trained in optimized for parameter in trained.parameters}
            for name, parameter in collect(model).items():
                if id(parameter) in held:
                    raise UnsupportedOperation(
                        f"parameter {name} belongs to another prepared model, too, and the servers would keep one of "
                        "it for each: use update_on='worker' with dist_sync"
                    )

    @property
    def _updates_on_servers(self) -> bool:
        return self.store.distributed and self.options.server_updates

    def check_updates(self, optimizer: Any, native: Any) -> None:
        if not self._updates_on_servers:
            super().check_updates(optimizer, native)
            return
        check_for_servers(optimizer, native)
        if isinstance(native, LAYERWISE) and int(os.environ["DMLC_NUM_SERVER"]) > 1:
            raise UnsupportedOperation(
                f"{type(native).__name__} needs the norm of each whole parameter, and several servers hold parts of "
                "the large ones: use one server, or update_on='worker' with dist_sync"
            )

    def make_trained(self, carried: Carried, optimizer: Any, native: Any) -> tuple[Trained, Any]:
        if optimizer is None or not self._updates_on_servers:
            return super().make_trained(carried, optimizer, native)
        if self.capabilities.optimizer_state is not True and self.world.rank == 0:  # now, not after the training
            sys.stderr.write(f"unidist: this optimizer cannot be saved: {self.capabilities.optimizer_state}\n")
        held = UpdatedByServer(carried, self.store, asynchronous=self.options.asynchronous)
        mx_optimizer = from_spec(optimizer) if native is None else native
        held.use(mx_optimizer, describe(optimizer if native is None else native))
        return held, mx_optimizer if native is None else optimizer

    def start_training(self, trained: Trained) -> None:
        copies = 4 if isinstance(trained, UpdatedByServer) else 2  # with the two moments of Adam
        self._check_memory(memory.too_little(trained.bytes, copies, self._servers))  # before they get anything
        super().start_training(trained)

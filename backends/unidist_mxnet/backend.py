"""MXNet KVStore behind the contract of `unidist.backend`."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from dataclasses import replace
from typing import Any, NoReturn

import mxnet as mx
from mxnet import nd

from unidist import World
from unidist.control import Control, ControlServer, connect_from_env
from unidist.errors import CommunicationError, StateError, UnsupportedOperation, UsageError
from unidist.watch import own_interface
from unidist_mxnet import MxnetOptions, capabilities, memory
from unidist_mxnet.blocks import check_for_servers
from unidist_mxnet.cluster import with_neighbours
from unidist_mxnet.exchange import Exchange
from unidist_mxnet.models import MxnetModels
from unidist_mxnet.optimizers import describe, from_spec
from unidist_mxnet.served import UpdatedByServer
from unidist_mxnet.store import Store
from unidist_mxnet.trained import Trained

FOREIGN = (
    "The servers run MXNet's own loop, inside `import mxnet`, where unidist cannot watch: import it after "
    "unidist.Strategy(), or start the scheduler and the servers with `python -m unidist_mxnet.roles`."
)
LAYERWISE = (mx.optimizer.LAMB, mx.optimizer.LARS, mx.optimizer.LBSGD)
_open = False


class MxnetBackend(MxnetModels):
    store: Store
    exchange: Exchange

    def __init__(self, world: World, options: MxnetOptions, device: str | None, timeout: float) -> None:
        global _open
        super().__init__(world, options, device, options.devices)
        self.capabilities = capabilities(options)
        if _open:
            raise StateError("a Strategy is open in this process already: close it before opening another")
        self._server: ControlServer | None = None
        store = Store(world, options, self.devices, timeout)
        control = self._control(store) if store.distributed else None
        # ps-lite numbers the workers; the launcher's own number, where there is one, is the one that users know.
        self.world = replace(world, rank=world.rank if world.rank >= 0 else store.rank)
        self.carry_by(store, Exchange(control, self.world.rank, world.world_size, options.collective_timeout))
        self._server_memory = [] if control is None else self._ask_servers(control)
        self._find_neighbours()
        self.transport = self._describe_transport()
        _open = True

    # -- meeting -----------------------------------------------------------------------------------------------

    def _control(self, store: Store) -> Control:
        """The launcher's control plane. Where there is none, the first worker brings one up."""
        control = connect_from_env()
        if control is not None:
            return control
        card = b""
        if store.rank == 0:
            self._server = ControlServer(own_interface(self.world)).start()
            # A server of MXNet's own cannot read this, says so in its log and goes on.
            store.command("answer", [], control=[self._server.url, self._server.token])
            card = json.dumps([self._server.url, self._server.token]).encode()
        return Control(*json.loads(store.tell_all(card)))

    def _ask_servers(self, control: Control) -> list[dict[str, int | str]]:
        servers = int(os.environ["DMLC_NUM_SERVER"])
        answers = self.exchange.meet(memory.ask(control, servers) if self.world.rank == 0 else None)[0]
        if len(answers) < servers:
            if self.options.server_updates:
                self._refuse_on_all_ranks(f"update_on='server' needs servers of unidist's. {FOREIGN}")
            if self.world.rank == 0:
                sys.stderr.write(f"unidist: should a process die, the others will wait for ever. {FOREIGN}\n")
        asked = self.options.server_memory
        if asked and any(each["bytes"] != int(asked * memory.GB) for each in answers):
            self._refuse_on_all_ranks(
                f"server_memory is {asked:g} here, and the servers were not told: say it to `unidist run --option "
                f"server_memory={asked:g}`"
            )
        return answers

    def _refuse_on_all_ranks(self, why: str) -> NoReturn:
        with contextlib.suppress(CommunicationError):
            self.exchange.meet()  # one of them may be the control plane: it is not to leave before the others know
        raise UsageError(why)

    def _find_neighbours(self) -> None:
        told = self.exchange.meet([self.store.rank, socket.gethostname()])
        self.store.rank_0_leads = told[0][0] == 0
        self.world = with_neighbours(self.world, [host for _, host in told])

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
        global _open
        _open = False
        if not failed:
            self._report_staleness()
            nd.waitall()
            self.exchange.meet()
        self.store.close(failed)
        self.exchange.close()
        if self._server is not None:
            self._server.close()

    def _report_staleness(self) -> None:
        counts = [each.staleness for each in self._trained.values() if getattr(each, "staleness", None)]
        for each in counts:
            each.settle()
        mine = [sum(e.updates for e in counts), sum(e.total for e in counts), max((e.worst for e in counts), default=0)]
        everyone = self.exchange.meet(mine)
        if self.world.rank == 0 and any(updates for updates, _, _ in everyone):
            each = [f"worker {r} {t / u:.2f} (at most {w})" for r, (u, t, w) in enumerate(everyone) if u]
            sys.stderr.write(f"unidist: updates by others between two of one's own, on average: {', '.join(each)}\n")

    # -- models whose parameters the servers hold

    def make_trained(self, carried: tuple[Any, ...], optimizer: Any, native: Any) -> tuple[Trained, Any]:
        if optimizer is None or not (self.store.distributed and self.options.server_updates):
            return super().make_trained(carried, optimizer, native)
        check_for_servers(optimizer, native)
        if isinstance(native, LAYERWISE) and int(os.environ["DMLC_NUM_SERVER"]) > 1:
            raise UnsupportedOperation(
                f"{type(native).__name__} needs the norm of each whole parameter, and several servers hold parts of "
                "the large ones: use one server, or update_on='worker' with dist_sync"
            )
        held = UpdatedByServer(*carried, asynchronous=self.options.asynchronous)
        own = from_spec(optimizer) if native is None else native
        held.use(own, describe(optimizer if native is None else native))
        return held, own if native is None else optimizer

    def start_training(self, trained: Trained) -> None:
        super().start_training(trained)
        copies = 4 if isinstance(trained, UpdatedByServer) else 2  # with the two moments of Adam
        problem = memory.warning(trained.bytes, copies, self._server_memory)
        if problem and self.world.rank == 0:
            sys.stderr.write(f"unidist: {problem}\n")

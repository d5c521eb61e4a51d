"""PyTorch DistributedDataParallel behind the contract of `unidist.backend`."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from unidist.plugin import (
    CommunicationError,
    Features,
    MicroBatch,
    PeerFailed,
    Reduction,
    StateError,
    UnsupportedOperation,
    UsageError,
    World,
)
from unidist_torch import TorchOptions, plugin
from unidist_torch.devices import pick_transport
from unidist_torch.meeting import MeetingStore
from unidist_torch.models import TorchModels
from unidist_torch.reducer import Reducer

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_chosen: dict[str, str] = {}  # what was not the user's choice, but ours
REDUCE = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


class TorchBackend(TorchModels):
    capabilities = plugin.capabilities

    def __init__(self, world: World, options: TorchOptions, device: str | None, timeout: float) -> None:
        super().__init__(world, options, device)
        available = {name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available")()}
        transport, why = pick_transport(options.transport, self.device, available)
        self.transport = f"{transport} ({why})"
        self._reducers: weakref.WeakKeyDictionary[Any, Reducer] = weakref.WeakKeyDictionary()
        self._frozen: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
        hook = sys.excepthook
        self._meet(transport, timeout)
        if world.source == "unidist":
            sys.excepthook = hook  # torch's own writes "[rank1]:" before each line, and the launcher does so already

    def _meet(self, transport: str, timeout: float) -> None:
        if dist.is_initialized():
            raise StateError(
                "torch.distributed is initialised already: leave init_process_group to unidist, and close the "
                "first Strategy before opening another"
            )
        world = self.world
        group = {"backend": transport, "timeout": timedelta(seconds=self.options.collective_timeout)}
        if transport == "mpi":
            dist.init_process_group(**group)  # the MPI library knows who is there
            return
        if world.peers is None:
            dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, **group)
            return
        # Held as long as the group, which calls into it from C++.
        self._store = MeetingStore(world.peers, timeout)
        _use_interface(world)
        try:
            dist.init_process_group(store=self._store, rank=world.rank, world_size=world.world_size, **group)
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {world.rank} of {world.world_size} has met the others, but could not connect to them from "
                f"{world.peers.address} (interface {world.peers.interface}) within {timeout:g} s: do firewalls let all "
                f"ports through between the hosts? torch says: {str(error).splitlines()[0]}"
            ) from error

    def close(self, failed: bool) -> None:
        super().close(failed)
        if not failed:
            self.barrier()
            dist.destroy_process_group()
            return
        # Left undestroyed, the group's threads make the process abort at its end and hide its own error; but destroying
        # it may wait for an operation under way, and so for peers.
        leaving = threading.Thread(target=dist.destroy_process_group, daemon=True)
        leaving.start()
        leaving.join(timeout=2.0)

    # -- collectives

    def all_reduce(self, tensor: torch.Tensor, op: Reduction) -> torch.Tensor:
        result = self._own_copy(tensor)
        if tensor.dtype == torch.bool:  # no transport reduces bool
            result = result.to(torch.int64)
        with self._translated(f"all_reduce {op}", tensor):
            dist.all_reduce(result, REDUCE[op])
        return result.bool() if tensor.dtype == torch.bool and op != "sum" else result

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        mine = self._own_copy(tensor)
        results = [torch.empty_like(mine) for _ in range(self.world.world_size)]
        with self._translated("all_gather", tensor):
            dist.all_gather(results, mine)
        return results

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        result = self._own_copy(tensor)
        with self._translated("broadcast", tensor):
            dist.broadcast(result, source)
        return result

    def barrier(self) -> None:
        with self._translated("barrier"):
            dist.barrier()

    @contextmanager
    def _translated(self, what: str, tensor: torch.Tensor | None = None) -> Iterator[None]:
        """torch reports both a wrong dtype and a dead peer as RuntimeError; only the second is somebody else's."""
        try:
            yield
        except RuntimeError as error:
            text = str(error).splitlines()[0]
            if "scalar type" in text or "not supported" in text.lower() or "unsupported" in text.lower():
                dtype = tensor.dtype if tensor is not None else "this"
                raise UnsupportedOperation(
                    f"{self.transport} cannot {what} {dtype}: convert to float32 first"
                ) from error
            raise PeerFailed(f"rank {self.world.rank} lost another rank during {what}: {text}") from error

    # -- models

    def check_prepare(self, model: Any, optimizer: Any) -> None:
        if isinstance(model, DistributedDataParallel):
            raise UsageError("the model is wrapped in DistributedDataParallel already: pass the module inside")
        super().check_prepare(model, optimizer)

    def prepare(self, model: Any, optimizer: Any, features: Features) -> tuple[Any, Any]:
        if self.options.static_graph and (features.accumulate or features.local):
            raise UsageError(
                "static_graph=True does not go with accumulate= or sync_every=: DDP's static graph has no backward "
                "without an exchange. Leave it out"
            )
        model, optimizer = self.ready(model, optimizer, features)
        self._frozen[model] = {
            name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad
        }
        if optimizer is None or not any(parameter.requires_grad for parameter in model.parameters()):
            # There is nothing to exchange, and DDP refuses a model without gradients.
            self.load_state(model, {k: self.to_numpy(self.broadcast(v, 0)) for k, v in self.state(model).items()})
            return model, optimizer
        self._reducers[model] = Reducer(model, self._device, self.options, features)
        self.share_buffers(model)
        self.set_precision(model, features)
        return model, optimizer

    # -- a training step

    def forward(self, model: Any, micro: MicroBatch) -> AbstractContextManager[None]:
        if self.options.broadcast_buffers and not self.in_group(model):
            self.share_buffers(model)
        return super().forward(model, micro)

    def differentiate(self, model: Any, loss: torch.Tensor, micro: MicroBatch) -> None:
        for name, parameter in self._frozen[model].items():
            if parameter.requires_grad:  # DDP has fixed what it exchanges: it would go its own way on every rank
                raise StateError(
                    f"parameter {name} was unfrozen after prepare(), which has settled what is exchanged: set "
                    "requires_grad before it, or prepare the model again"
                )
        self._reducers[model].backward(loss, micro)

    def take_mean_weight(self, model: Any) -> float | torch.Tensor:
        return self._reducers[model].take_mean_weight()

    def clear_gradients(self, model: Any) -> None:
        super().clear_gradients(model)
        if model in self._reducers:  # not where all of it is frozen
            self._reducers[model].clear()

    def average_alike(self, tensors: list[torch.Tensor], what: str) -> None:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        with self._translated(what, flat):
            dist.all_reduce(flat)
        parts = flat.div_(self.world.world_size).split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


def _use_interface(world: World) -> None:
    """Left alone, gloo listens on whatever the hostname resolves to, which need not be reachable, nor local."""
    assert world.peers is not None
    for name in INTERFACES:
        if os.environ.get(name, "") == _chosen.get(name, "") and world.peers.interface:
            os.environ[name] = _chosen[name] = world.peers.interface

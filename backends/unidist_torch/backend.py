"""PyTorch DistributedDataParallel behind the contract of `unidist.backend`."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from unidist import Features, World
from unidist.backend import Reduction
from unidist.errors import CommunicationError, PeerFailed, StateError, UnsupportedOperation, UsageError
from unidist_torch import TorchOptions, compression, plugin
from unidist_torch.devices import pick_transport
from unidist_torch.models import TorchModels

REDUCE = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


class TorchBackend(TorchModels):
    capabilities = plugin.capabilities

    def __init__(self, world: World, options: TorchOptions, device: str | None, timeout: float) -> None:
        super().__init__(world, options, device)
        available = {name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available")()}
        transport, why = pick_transport(options.transport, self.device, available)
        self.transport = f"{transport} ({why})"
        self._meet(transport, timeout)

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
        if world.world_size == 1:
            dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, **group)
            return
        if world.master_addr is None or world.master_port is None:
            raise UsageError(
                f"{world.source} does not say where rank 0 is: set MASTER_ADDR and MASTER_PORT for every process, "
                "or start with `unidist run`"
            )
        if world.master_addr in ("127.0.0.1", "localhost", "::1") and "lo" in dict(
            map(reversed, socket.if_nameindex())
        ):
            # Left alone, gloo listens on whatever the hostname resolves to, which need not be reachable, nor local.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        # Under torchrun its agent hosts the store and no rank listens. In a process started otherwise, an inherited
        # flag would make every rank wait for an agent that is not there.
        agent = world.source == "torchrun" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        try:
            store = dist.TCPStore(
                world.master_addr,
                world.master_port,
                world.world_size,
                is_master=world.rank == 0 and not agent,
                timeout=timedelta(seconds=timeout),
                multi_tenant=not agent,
            )
            dist.init_process_group(store=store, rank=world.rank, world_size=world.world_size, **group)
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {world.rank} of {world.world_size} could not meet the others at "
                f"{world.master_addr}:{world.master_port} within {timeout:g} s. Are all ranks started, is the address "
                f"that of rank 0's host, and is the port free there? torch says: {str(error).splitlines()[0]}"
            ) from error

    def close(self, failed: bool) -> None:
        if not failed:
            self.barrier()  # rank 0 hosts the store: it must not leave first
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

    def prepare(self, model: Any, optimizer: Any, features: Features) -> tuple[Any, Any]:
        if isinstance(model, DistributedDataParallel):
            raise UsageError(
                "the model is wrapped in DistributedDataParallel already: pass the bare module, prepare wraps it"
            )
        model, optimizer = self.ready(model, optimizer, features)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            # DDP refuses such a model; all it would do is the broadcast.
            self.load_state(model, {k: self.to_numpy(self.broadcast(v, 0)) for k, v in self.state(model).items()})
            return model, optimizer
        wrapped = DistributedDataParallel(
            model,
            device_ids=[self._device.index] if self._device.type == "cuda" else None,
            bucket_cap_mb=self.options.bucket_cap_mb,
            find_unused_parameters=self.options.find_unused_parameters,
            static_graph=self.options.static_graph,
            gradient_as_bucket_view=True,
            # True is DDP's default; to name it would bring its warning about the name.
            **({} if self.options.broadcast_buffers else {"broadcast_buffers": False}),
        )
        if features.compression is not None:
            compression.register(wrapped, features.compression)
        self.set_precision(wrapped, features)
        return wrapped, optimizer

    def unwrap(self, model: Any) -> Any:
        return model.module if isinstance(model, DistributedDataParallel) else model

    @contextmanager
    def evaluate(self, model: Any) -> Iterator[None]:
        bare = self.unwrap(model)
        outermost = bare is not model and "forward" not in model.__dict__
        if outermost:
            model.forward = bare.__call__  # not DDP's: it communicates
        try:
            with super().evaluate(model):
                yield
        finally:
            if outermost:
                del model.forward

    # -- a training step

    def forward(self, model: Any, sync: bool) -> AbstractContextManager[None]:
        if model in self._precision:
            return self._mixed(model, sync)
        return nullcontext() if sync else model.no_sync()

    @contextmanager
    def _mixed(self, model: Any, sync: bool) -> Iterator[None]:
        with nullcontext() if sync else model.no_sync(), torch.autocast(self._device.type, self._precision[model]):
            yield

    def average(self, model: Any, what: Literal["gradients", "parameters"]) -> None:
        for alike in self.averaged(model, what):
            flat = torch.cat([tensor.reshape(-1) for tensor in alike])
            with self._translated(f"average {what}", flat):
                dist.all_reduce(flat)
            parts = flat.div_(self.world.world_size).split([tensor.numel() for tensor in alike])
            for tensor, part in zip(alike, parts, strict=True):
                tensor.copy_(part.view_as(tensor))

"""torch models over Horovod behind the contract of `unidist.backend`.

Gradients are averaged by one grouped all-reduce when they are complete, not by DistributedOptimizer: it wants to know
beforehand how many backward passes make a step, and the last group of an epoch may be shorter.
"""

from __future__ import annotations

import weakref
from functools import partial
from itertools import chain
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch.mpi_ops import HorovodInternalError  # fails without the native library; the import above does not

from unidist.plugin import Features, MicroBatch, RanksDisagree, Reduction, UnsupportedOperation, UsageError, World
from unidist_horovod import HorovodOptions, meeting, plugin
from unidist_horovod.gradients import Gradients, carried, gradients_of
from unidist_horovod.meeting import Meeting, translated
from unidist_torch.models import TorchModels

REDUCE = {"sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max}
# Horovod reduces int32, int64, float16, float32 and float64; the others travel as one that holds their values.
CARRIER = {
    torch.bool: torch.int64,
    torch.uint8: torch.int32,
    torch.int8: torch.int32,
    torch.int16: torch.int32,
    torch.bfloat16: torch.float32,
} | {dtype: dtype for dtype in (torch.int32, torch.int64, torch.float16, torch.float32, torch.float64)}


class TorchOverHorovod(TorchModels):
    capabilities = plugin.capabilities

    def __init__(self, world: World, options: HorovodOptions, device: str | None, timeout: float) -> None:
        super().__init__(world, options, device)
        if self._device.type == "cuda" and not (hvd.nccl_built() or hvd.cuda_built()):
            raise UsageError(
                f"device {self.device!r} was asked for, but this Horovod was built without GPU operations: build it "
                "with HOROVOD_GPU_OPERATIONS=NCCL, or say device='cpu'"
            )
        self._meeting = Meeting(hvd, hvd.barrier, HorovodInternalError, world, options, timeout)
        self.world = self._meeting.world
        self.transport, self.version = self._meeting.transport, f"on torch {torch.__version__}"
        self._translated = partial(translated, rank=self.world.rank, internal_error=HorovodInternalError)
        self._gradients: weakref.WeakKeyDictionary[Any, Gradients] = weakref.WeakKeyDictionary()
        self._models = 0

    def close(self, failed: bool) -> None:
        super().close(failed)
        self._meeting.leave(failed)

    # -- collectives. Their names are the same each time: Horovod remembers the agreement on a name

    def all_reduce(self, tensor: torch.Tensor, op: Reduction) -> torch.Tensor:
        if tensor.dtype not in CARRIER:
            raise UnsupportedOperation(
                f"Horovod does not reduce {tensor.dtype}: convert it, to int64 or float64 say, or use all_gather"
            )
        result = self._own_copy(tensor).to(CARRIER[tensor.dtype])
        if result.numel():
            with self._translated(f"all_reduce {op}"):
                result = hvd.allreduce_(result, op=REDUCE[op], name=f"all_reduce {op}")
        return result if tensor.dtype == torch.bool and op == "sum" else result.to(tensor.dtype)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        mine = self._own_copy(tensor)
        if not mine.numel():
            return [mine.clone() for _ in range(self.world.world_size)]
        with self._translated("all_gather"):
            pieces = _as_bytes(mine).split(max(1, meeting.MOST_BYTES // self.world.world_size))
            gathered = [hvd.allgather(piece.unsqueeze(0), name="all_gather") for piece in pieces]
        return [torch.cat(rows).view(mine.dtype).view(mine.shape) for rows in zip(*gathered, strict=True)]

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        result = self._own_copy(tensor)
        if result.numel():
            with self._translated("broadcast"):
                for piece in _as_bytes(result).split(meeting.MOST_BYTES):
                    hvd.broadcast_(piece, source, name=f"broadcast from {source}")
        return result

    def barrier(self) -> None:
        with self._translated("barrier"):
            hvd.barrier()

    # -- models

    def check_prepare(self, model: Any, optimizer: Any) -> None:
        super().check_prepare(model, optimizer)
        if hasattr(optimizer, "skip_synchronize"):  # its class is made for each, and has the name of the one inside
            raise UsageError(
                "this optimizer was wrapped by hvd.DistributedOptimizer, which would average gradients a second time: "
                "pass the torch.optim one as it is"
            )

    def prepare(self, model: Any, optimizer: Any, features: Features) -> tuple[Any, Any]:
        model, optimizer = self.ready(model, optimizer, features, self._differentiable_sum)
        with self._translated("prepare"):
            self._same_start(model)
            if isinstance(optimizer, torch.optim.Optimizer):
                self._same_optimizer_state(model, optimizer)
        if optimizer is not None:
            self._models += 1  # every rank prepares in the same order
            self._gradients[model] = gradients_of(model, f"gradients of model {self._models}", features.compression)
        self.set_precision(model, features)
        return model, optimizer

    def _same_start(self, model: Any) -> None:
        """Everything is under way before the first is waited for. hvd.broadcast_parameters knows fewer dtypes."""
        moving = []
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):  # state_dict() has not all buffers
            if tensor.numel():
                tensor = tensor.detach()
                whole = tensor.contiguous()
                handles = [
                    hvd.broadcast_async_(piece, 0, name=f"start of {name}, {number}")
                    for number, piece in enumerate(_as_bytes(whole).split(meeting.MOST_BYTES))
                ]
                moving.append((tensor, whole, handles))
        for tensor, whole, handles in moving:
            for handle in handles:
                hvd.synchronize(handle)
            if whole is not tensor:
                tensor.copy_(whole)

    def _differentiable_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._translated("batch normalisation"):
            return _Sum.apply(tensor)

    def _same_optimizer_state(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        """For an optimizer that has made steps. hvd.broadcast_optimizer_state would make one, to have all of it."""
        tensors, _ = self.optimizer_state(model, optimizer)
        counts = [int(count) for count in self.all_gather(torch.tensor(len(tensors)))]
        if len(set(counts)) > 1:
            raise RanksDisagree(
                f"the optimizer's state has {', '.join(map(str, counts))} tensors on ranks 0 to {len(counts) - 1}: "
                "give every rank an optimizer that made the same steps, or a new one"
            )
        for tensor in tensors.values():
            tensor.copy_(self.broadcast(tensor, 0))

    def average_alike(self, tensors: list[torch.Tensor], what: str) -> None:
        with self._translated(what), torch.no_grad(), carried(tensors) as whole:
            hvd.grouped_allreduce_(whole, op=hvd.Average, name=what)

    # -- a training step

    def differentiate(self, model: Any, loss: torch.Tensor, micro: MicroBatch) -> None:
        loss.backward()
        self._gradients[model].weight += micro.weight
        if micro.sync:
            with self._translated("the sum of gradients"):
                self._gradients[model].average()

    def take_mean_weight(self, model: Any) -> float:
        return self._gradients[model].take_weight()

    def clear_gradients(self, model: Any) -> None:
        super().clear_gradients(model)
        self._gradients[model].take_weight()


class _Sum(torch.autograd.Function):  # type: ignore[misc]  # torch is not there to be checked
    """Horovod's own differentiable sum stumbles over gradients that are not contiguous."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor) -> torch.Tensor:
        return hvd.allreduce_(tensor.clone(), op=hvd.Sum, name="batch normalisation")

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return _Sum.forward(context, gradient.contiguous())


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory. What is only moved needs no arithmetic, so every dtype passes."""
    return tensor.view(-1).view(torch.uint8)

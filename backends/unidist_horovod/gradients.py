"""The gradients of one torch model: their mean over ranks, whole or compressed."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch

from unidist import PowerSGD, TopK
from unidist.errors import UnsupportedOperation


def gradients_of(model: Any, name: str, compression: Any) -> Gradients:
    if compression is None:
        return Gradients(model, name)
    if isinstance(compression, TopK):
        return LargestPart(model, name, compression.ratio)
    if isinstance(compression, PowerSGD):
        return LowRank(model, name, compression.rank, compression.start)
    return {"fp16": Halves, "bf16": BrainHalves}[compression](model, name)


class Gradients:
    """`name`, and the names of parameters, are what Horovod's timeline and its warnings of a stall will show.

    They travel as a group, which Horovod numbers: one by one, each under its parameter's name, many take longer.
    """

    def __init__(self, model: Any, name: str) -> None:
        trained = {each: parameter for each, parameter in model.named_parameters() if parameter.requires_grad}
        self._parameters = list(trained.values())
        self._name = f"{name}, {next(iter(trained), '')} to {next(reversed(trained), '')}"

    @torch.no_grad()
    def average(self) -> None:
        """Replace each gradient by its mean over all ranks."""
        gradients = self.held()
        for dtype in dict.fromkeys(each.dtype for each in gradients):
            self._exchange([each for each in gradients if each.dtype == dtype], f"{self._name}, {dtype}")

    def held(self) -> list[torch.Tensor]:
        """All of them, on every rank: a layer that this rank did not use may have been used on another."""
        gradients = []
        for parameter in self._parameters:
            if not parameter.requires_grad:
                continue
            gradient = parameter.grad
            if gradient is None:
                gradient = parameter.grad = torch.zeros_like(parameter)
            elif gradient.layout is not torch.strided:
                raise UnsupportedOperation("sparse gradients do not travel through Horovod here: use sparse=False")
            elif not gradient.is_contiguous():
                gradient = parameter.grad = gradient.contiguous()
            gradients.append(gradient)
        return gradients

    def _exchange(self, gradients: list[torch.Tensor], name: str) -> None:
        hvd.grouped_allreduce_(gradients, op=hvd.Average, name=name)


class Halves(Gradients):
    """Rounded to float16. Divided first: their sum might not fit."""

    def _exchange(self, gradients: list[torch.Tensor], name: str) -> None:
        halves = torch._foreach_div([each.half() for each in gradients], hvd.size())
        hvd.grouped_allreduce_(halves, op=hvd.Sum, name=name)
        torch._foreach_copy_(gradients, halves)


class BrainHalves(Gradients):
    """Rounded to bfloat16, which Horovod moves, as bytes, but cannot add up: every rank adds up all of them."""

    def _exchange(self, gradients: list[torch.Tensor], name: str) -> None:
        mine = torch.cat([each.reshape(-1) for each in gradients]).to(torch.bfloat16).view(torch.uint8)
        rows = hvd.allgather(mine.unsqueeze(0), name=name).view(torch.bfloat16).to(gradients[0].dtype)
        _fill(gradients, rows.mean(0))


class LargestPart(Gradients):
    """The largest part of all gradients travels; the rest waits until it is large enough."""

    def __init__(self, model: Any, name: str, ratio: float) -> None:
        super().__init__(model, name)
        self._ratio = ratio
        self._rest: dict[str, torch.Tensor] = {}

    def _exchange(self, gradients: list[torch.Tensor], name: str) -> None:
        flat = torch.cat([each.reshape(-1) for each in gradients])
        if name in self._rest:
            flat += self._rest[name]
        chosen = torch.topk(flat.abs(), max(1, int(self._ratio * flat.numel())), sorted=False).indices
        values = hvd.allgather(flat[chosen].unsqueeze(0), name=f"{name}, values")
        places = hvd.allgather(chosen.unsqueeze(0), name=f"{name}, places")
        flat[chosen] = 0
        self._rest[name] = flat
        mean = torch.zeros_like(flat)
        for where, theirs in zip(places, values, strict=True):
            mean.index_add_(0, where, theirs, alpha=1 / hvd.size())
        _fill(gradients, mean)


class LowRank(Gradients):
    """Each matrix travels as the product of two thin ones (PowerSGD); what that leaves out is added to the next."""

    def __init__(self, model: Any, name: str, rank: int, start: int) -> None:
        super().__init__(model, name)
        self._rank, self._start = rank, start
        self._updates = 0
        self._errors: dict[int, torch.Tensor] = {}
        self._factors: dict[int, torch.Tensor] = {}  # of the last step, to begin the next with

    def average(self) -> None:
        self._updates += 1
        super().average()

    def _exchange(self, gradients: list[torch.Tensor], name: str) -> None:
        if self._updates <= self._start:
            super()._exchange(gradients, name)
            return
        thin = [n for n, each in enumerate(gradients) if self._pays(each)]
        rest = [each for n, each in enumerate(gradients) if n not in thin]
        if rest:
            super()._exchange(rest, f"{name}, whole")
        if not thin:
            return
        matrices = [gradients[n].view(gradients[n].shape[0], -1) for n in thin]
        for n, matrix in zip(thin, matrices, strict=True):
            if n in self._errors:
                matrix += self._errors[n]
        right = [self._factor(n, matrix) for n, matrix in zip(thin, matrices, strict=True)]
        left = [matrix @ q for matrix, q in zip(matrices, right, strict=True)]
        super()._exchange(left, f"{name}, left")
        left = [torch.linalg.qr(each)[0] for each in left]
        right = [matrix.T @ p for matrix, p in zip(matrices, left, strict=True)]
        super()._exchange(right, f"{name}, right")
        for n, matrix, p, q in zip(thin, matrices, left, right, strict=True):
            product = p @ q.T
            self._errors[n], self._factors[n] = matrix - product, q
            matrix.copy_(product)

    def _pays(self, gradient: torch.Tensor) -> bool:
        rows = gradient.shape[0] if gradient.dim() > 1 else 1
        columns = gradient.numel() // rows
        return rows > 1 and self._rank < min(rows, columns) and (rows + columns) * self._rank < rows * columns

    def _factor(self, number: int, matrix: torch.Tensor) -> torch.Tensor:
        if number not in self._factors:
            same = torch.Generator().manual_seed(number)  # on all ranks
            start = torch.randn(matrix.shape[1], self._rank, generator=same).to(matrix)
            self._factors[number] = torch.linalg.qr(start)[0]
        return self._factors[number]


def _fill(gradients: list[torch.Tensor], flat: torch.Tensor) -> None:
    parts = flat.split([each.numel() for each in gradients])
    torch._foreach_copy_(gradients, [part.view_as(each) for part, each in zip(parts, gradients, strict=True)])

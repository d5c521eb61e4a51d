"""The gradients of one torch model: their mean over ranks, whole or compressed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import horovod.torch as hvd
import torch

from unidist.plugin import PowerSGD, TopK, UnsupportedOperation


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
        names = [parameter_name for parameter_name, _ in model.named_parameters()]
        self._parameters = list(model.parameters())  # frozen ones too: they may thaw
        self._name = f"{name}, {names[0]} to {names[-1]}" if names else name
        self.weight = 0.0  # of the losses whose gradients are there; after `average`, its mean over the ranks

    def take_weight(self) -> float:
        weight, self.weight = self.weight, 0.0
        return 1.0 if abs(weight - 1.0) < 1e-12 else weight  # a third and a third and a third

    @torch.no_grad()  # type: ignore[untyped-decorator]  # torch is not there to be checked
    def average(self) -> None:
        """Replace each gradient, and the weight, by its mean over all ranks."""
        trained = {number: parameter for number, parameter in enumerate(self._parameters) if parameter.requires_grad}
        used = torch.tensor(
            [*(float(parameter.grad is not None) for parameter in trained.values()), self.weight], dtype=torch.float64
        )
        gradients = {number: _held(parameter) for number, parameter in trained.items()}
        if not gradients:
            return
        agreeing = hvd.allreduce_async_(used, op=hvd.Average, name=f"{self._name}, used")
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients.values()):
            numbers = [number for number, gradient in gradients.items() if gradient.dtype == dtype]
            with carried([gradients[number] for number in numbers]) as alike:
                self._exchange(dict(zip(numbers, alike, strict=True)), f"{self._name}, {dtype}")
        hvd.synchronize(agreeing)
        *shares, self.weight = used.tolist()
        for parameter, share in zip(trained.values(), shares, strict=True):
            if not share and not parameter.grad.any():  # a compression may have kept some of it until now
                parameter.grad = None  # zeros would let momentum and weight decay move what nobody used

    def _exchange(self, gradients: dict[int, torch.Tensor], name: str) -> None:
        """In place. They are of one dtype and contiguous, by their parameters' places in the model."""
        hvd.grouped_allreduce_(list(gradients.values()), op=hvd.Average, name=name)


class Halves(Gradients):
    """Rounded to float16. Divided first: their sum might not fit."""

    def _exchange(self, gradients: dict[int, torch.Tensor], name: str) -> None:
        halves = torch._foreach_div([gradient.half() for gradient in gradients.values()], hvd.size())
        hvd.grouped_allreduce_(halves, op=hvd.Sum, name=name)
        torch._foreach_copy_(list(gradients.values()), halves)


class BrainHalves(Gradients):
    """Rounded to bfloat16, which Horovod moves, as bytes, but cannot add up: every rank adds up all of them."""

    def _exchange(self, gradients: dict[int, torch.Tensor], name: str) -> None:
        flat = _flat(gradients)
        mine = flat.to(torch.bfloat16).view(torch.uint8)
        rows = hvd.allgather(mine.unsqueeze(0), name=name).view(torch.bfloat16).to(flat.dtype)
        _fill(gradients, rows.mean(0))


class LargestPart(Gradients):
    """The largest part of all gradients travels; the rest waits until it is large enough."""

    def __init__(self, model: Any, name: str, ratio: float) -> None:
        super().__init__(model, name)
        self._ratio = ratio
        self._rest: dict[int, torch.Tensor] = {}

    def _exchange(self, gradients: dict[int, torch.Tensor], name: str) -> None:
        for number, gradient in gradients.items():
            if number in self._rest:
                gradient += self._rest[number]
        flat = _flat(gradients)
        chosen = torch.topk(flat.abs(), max(1, int(self._ratio * flat.numel())), sorted=False).indices
        values = hvd.allgather(flat[chosen].unsqueeze(0), name=f"{name}, values")
        places = hvd.allgather(chosen.unsqueeze(0), name=f"{name}, places")
        flat[chosen] = 0
        self._rest.update(_parts(flat, gradients))
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

    def _exchange(self, gradients: dict[int, torch.Tensor], name: str) -> None:
        if self._updates <= self._start:
            super()._exchange(gradients, name)
            return
        thin = [number for number, gradient in gradients.items() if self._pays(gradient)]
        rest = [gradient for number, gradient in gradients.items() if number not in thin]
        if rest:
            hvd.grouped_allreduce_(rest, op=hvd.Average, name=f"{name}, whole")
        if not thin:
            return
        matrices = [gradients[number].view(gradients[number].shape[0], -1) for number in thin]
        for number, matrix in zip(thin, matrices, strict=True):
            if number in self._errors:
                matrix += self._errors[number]
        right = [self._factor(number, matrix) for number, matrix in zip(thin, matrices, strict=True)]
        left = [matrix @ q for matrix, q in zip(matrices, right, strict=True)]
        hvd.grouped_allreduce_(left, op=hvd.Average, name=f"{name}, left")
        left = [torch.linalg.qr(factor)[0] for factor in left]
        right = [matrix.T @ p for matrix, p in zip(matrices, left, strict=True)]
        hvd.grouped_allreduce_(right, op=hvd.Average, name=f"{name}, right")
        for number, matrix, p, q in zip(thin, matrices, left, right, strict=True):
            product = p @ q.T
            self._errors[number], self._factors[number] = matrix - product, q
            matrix.copy_(product)

    def _pays(self, gradient: torch.Tensor) -> bool:
        if gradient.dim() < 2 or not gradient.numel():
            return False
        rows, columns = gradient.shape[0], gradient.numel() // gradient.shape[0]
        return bool(self._rank < min(rows, columns) and (rows + columns) * self._rank < rows * columns)

    def _factor(self, number: int, matrix: torch.Tensor) -> torch.Tensor:
        if number not in self._factors:
            same = torch.Generator().manual_seed(number)  # on all ranks
            start = torch.randn(matrix.shape[1], self._rank, generator=same).to(matrix)
            self._factors[number] = torch.linalg.qr(start)[0]
        return self._factors[number]


@contextmanager
def carried(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The tensors as Horovod can add them up: contiguous, and bfloat16 as float32. The results are copied back."""
    whole = [tensor.float() if tensor.dtype == torch.bfloat16 else tensor.contiguous() for tensor in tensors]
    yield whole
    for tensor, result in zip(tensors, whole, strict=True):
        if result is not tensor:
            tensor.copy_(result)


def _held(parameter: torch.nn.Parameter) -> torch.Tensor:
    """A gradient on every rank: a layer that this rank did not use may have been used on another."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    elif parameter.grad.layout is not torch.strided:
        raise UnsupportedOperation("sparse gradients do not travel through Horovod here: use sparse=False")
    return parameter.grad


def _flat(gradients: dict[int, torch.Tensor]) -> torch.Tensor:
    return torch.cat([gradient.reshape(-1) for gradient in gradients.values()])


def _parts(flat: torch.Tensor, gradients: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    parts = flat.split([gradient.numel() for gradient in gradients.values()])
    return {number: part.view_as(gradient) for part, (number, gradient) in zip(parts, gradients.items(), strict=True)}


def _fill(gradients: dict[int, torch.Tensor], flat: torch.Tensor) -> None:
    torch._foreach_copy_(list(gradients.values()), list(_parts(flat, gradients).values()))

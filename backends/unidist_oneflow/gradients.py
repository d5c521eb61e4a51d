"""The gradients of a model in one flat buffer for each dtype, so that a step communicates once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import oneflow as flow

from unidist.errors import StateError

Tensor = Any


class FlatGradients:
    """Each parameter's `.grad` is a view of a buffer: backward adds into it, without communication.

    OneFlow's own DDP communicates at every backward, so it could not skip that while accumulating.
    """

    def __init__(self, named: Mapping[str, Tensor], device: str) -> None:
        self.buffers: list[Tensor] = []
        self.layout: list[list[Tensor]] = []  # the parameters of each buffer, in its order
        for dtype in (flow.float32, flow.float64):
            chosen = [each for each in named.values() if each.dtype == dtype]
            if not chosen:
                continue
            sizes = [math.prod(each.shape) for each in chosen]
            buffer = flow.zeros(sum(sizes), dtype=dtype, device=device)
            begin = 0
            for parameter, size in zip(chosen, sizes, strict=True):
                parameter.grad = flow._C.slice_view_1d_contiguous(buffer, begin, begin + size).view(parameter.shape)
                begin += size
            self.buffers.append(buffer)
            self.layout.append(chosen)
        self._views = [(parameter, parameter.grad) for chosen in self.layout for parameter in chosen]
        self._used = False  # what the buffers hold has been applied
        self.waiting = False  # gradients of earlier batches are there, to be applied with the next ones

    def add(self, flat: Sequence[Tensor]) -> None:
        """Gradients that were computed elsewhere, one tensor for each buffer."""
        for buffer, part in zip(self.buffers, flat, strict=True):
            buffer.copy_(part) if self._used else buffer.add_(part)
        self._used, self.waiting = False, True

    def check_in_place(self) -> None:
        if any(parameter.grad is not view for parameter, view in self._views):
            raise StateError(
                "the gradients were replaced, by zero_grad(set_to_none=True) or an assignment to .grad: unidist clears "
                "them after each update, leave that to it"
            )

    def finish(self, exchange: bool, rescale: float, clip_norm: float | None) -> None:
        """Sum over the ranks, then scale, then clip by the norm of all of them together."""
        self.check_in_place()
        for buffer in self.buffers:
            if exchange:
                flow._C.local_all_reduce(buffer, inplace=True)
            if rescale != 1.0:
                buffer.mul_(rescale)
        if clip_norm is not None:
            squares = [(buffer * buffer).sum().to(flow.float64) for buffer in self.buffers]
            norm = sum(squares[1:], squares[0]).sqrt()
            factor = (clip_norm / (norm + 1e-6)).clamp(max=1.0)
            for buffer in self.buffers:
                buffer.mul_(factor.to(buffer.dtype))

    def clear(self) -> None:
        self._used = self.waiting = False
        for buffer in self.buffers:
            buffer.zero_()

    def clear_later(self) -> None:
        """Where the next ones come by `add`, which can write over these; else `clear_used` comes before a backward."""
        self._used, self.waiting = True, False

    def clear_used(self) -> None:
        if self._used:
            self.clear()

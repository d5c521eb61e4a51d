"""The gradients of a model in one flat buffer for each dtype, so that a step communicates once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import oneflow as flow

from unidist.plugin import Features, MicroBatch, StateError

Tensor = Any

LEAST = 1e-30  # of a weight by which is divided
CHANGED = (
    "the gradients were changed in the middle of an accumulation group, as by zero_grad() or by a backward() of the "
    "loop's own: leave it out, the step clears them after each update"
)
UNDIVIDED = (
    "the gradients were changed between backward and step, when they were not divided yet by what the uneven batches "
    "of the ranks weigh: clip by strategy.step(optimizer, clip_norm=…), or use equal batches, as with tail='drop'"
)


class FlatGradients:
    """Each parameter's `.grad` is a view of a buffer: backward adds into it, without communication.

    OneFlow's own DDP communicates at every backward, so it could not skip that while accumulating. The last buffer has
    one more element, which travels with the gradients: what they weigh.
    """

    def __init__(self, named: Mapping[str, Tensor], device: str, ranks: int, features: Features) -> None:
        self.buffers: list[Tensor] = []
        self.layout: list[list[Tensor]] = []  # the parameters of each buffer, in its order
        self._whole: list[Tensor] = []  # the buffers as they travel
        self._ranks, self.accumulates = ranks, features.accumulate
        # Where each batch is exchanged at once, its loss is divided by the number of ranks, which takes no time.
        self._early = not features.accumulate and not features.local
        present = {parameter.dtype for parameter in named.values()}
        dtypes = [dtype for dtype in (flow.float32, flow.float64) if dtype in present]
        for dtype in dtypes:
            chosen = [parameter for parameter in named.values() if parameter.dtype == dtype]
            sizes = [math.prod(parameter.shape) for parameter in chosen]
            whole = flow.zeros(sum(sizes) + (dtype == dtypes[-1]), dtype=dtype, device=device)
            begin = 0
            for parameter, size in zip(chosen, sizes, strict=True):
                parameter.grad = _part(whole, begin, begin + size).view(parameter.shape)
                begin += size
            self._whole.append(whole)
            self.buffers.append(_part(whole, 0, begin))
            self.layout.append(chosen)
        self._weight = _part(self._whole[-1], begin, begin + 1)
        self._sizes: list[Tensor] = []  # the sums of squares of gradients that wait for the rest of their group
        self._changes: list[Tensor] = []  # whether these had changed when the group went on; not read before its update
        self._used = True  # what the buffers hold has been applied, or is of no step
        self.waiting = False  # gradients of earlier batches are there, to be applied with the next ones
        self._lost = False  # these were cleared
        self._local_weight = 0.0  # of the batches whose gradients are there
        self._mean_weight: float | None = 1.0  # over the ranks; None: it is in the buffer

    @property
    def divisor(self) -> float:
        """Of a loss whose gradients are added here."""
        return self._ranks if self._early else 1.0

    def begin(self) -> None:
        """Before gradients are added."""
        if self._used:
            self.clear()
        self.check()
        self._changes += map(_differ, self._measure() if self._sizes else [], self._sizes)
        self._sizes = []

    def _measure(self) -> list[Tensor]:
        return [(buffer * buffer).sum() for buffer in self.buffers]

    def cleared(self) -> None:
        """By somebody else."""
        self._lost = self.waiting

    def check(self) -> None:
        """Nobody else has cleared gradients that wait."""
        if self._lost:
            raise StateError(CHANGED)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Inside, what is added to the gradients does not stay."""
        before = [buffer.clone() for buffer in self.buffers]
        try:
            yield
        finally:
            for buffer, values in zip(self.buffers, before, strict=True):
                buffer.copy_(values)

    def add(self, flat: Sequence[Tensor]) -> None:
        """Gradients that were computed elsewhere, one tensor for each buffer."""
        if not self._used:
            self.begin()
        for buffer, part in zip(self.buffers, flat, strict=True):
            buffer.copy_(part) if self._used else buffer.add_(part)
        self._used = False

    def added(self, micro: MicroBatch, summed: bool = False) -> None:
        """Gradients were added. With `summed` they are the only ones, and sums over the ranks already."""
        self._local_weight += micro.weight
        self.waiting = True
        if summed:
            self._mean_weight = self._local_weight
        elif micro.sync:
            self._exchange()
        if (self.accumulates and not micro.sync) or micro.spelled_out:
            self._sizes = self._measure()

    def _exchange(self) -> None:
        """Gradients and weights become their means over the ranks."""
        self._weight.fill_(self._local_weight / self.divisor)
        for whole in self._whole:
            flow._C.local_all_reduce(whole, inplace=True)
            if not self._early:
                whole.mul_(1.0 / self._ranks)
        self._mean_weight = None

    def average(self) -> None:
        """The same for gradients whose weights are known, or that have none."""
        self.begin()
        for whole in self._whole if self._ranks > 1 else ():
            flow._C.local_all_reduce(whole, inplace=True)
            whole.mul_(1.0 / self._ranks)

    @property
    def _final(self) -> bool:
        """Whether the gradients need not be divided by anything."""
        mean = float(self._weight.numpy()[0]) if self._mean_weight is None else self._mean_weight
        return abs(mean - 1.0) < 1e-6

    def take_mean_weight(self) -> float | Tensor:
        """What the gradients have to be divided by. Where it came with them it stays a tensor, since reading it would
        wait for all that was queued before. Where nothing weighs anything, there is no gradient to divide."""
        if any(map(_is_true, self._changes)):
            raise StateError(CHANGED)
        if self._sizes and not self._final and any(map(_is_true, map(_differ, self._measure(), self._sizes))):
            raise StateError(UNDIVIDED)  # they were changed by the user, since backward
        mean, self._mean_weight = self._mean_weight, 1.0
        return self._weight.clamp(min=LEAST) if mean is None else mean or 1.0

    def scale(self, factor: float | Tensor) -> None:
        if isinstance(factor, float) and factor == 1.0:
            return
        for buffer in self.buffers:
            buffer.mul_(factor if isinstance(factor, float) else factor.to(buffer.dtype))

    def clip(self, norm: float) -> None:
        """Clip by the norm of all gradients together."""
        squares = [(buffer * buffer).sum().to(flow.float64) for buffer in self.buffers]
        total_norm = sum(squares[1:], squares[0]).sqrt()
        self.scale((norm / (total_norm + 1e-6)).clamp(max=1.0))

    def clear(self) -> None:
        self.clear_later()
        self._used = False
        for whole in self._whole:
            whole.zero_()

    def clear_later(self) -> None:
        """`begin` clears them, together with what a backward of the user's adds in the meantime."""
        self._used, self.waiting = True, False
        self._local_weight, self._mean_weight = 0.0, 1.0
        self._lost, self._sizes, self._changes = False, [], []


def _differ(now: Tensor, then: Tensor) -> Tensor:
    """Not a number is not equal to itself."""
    return (now != then) & ((now == now) | (then == then))


def _is_true(flag: Tensor) -> bool:
    return bool(flag.numpy())


def _part(buffer: Tensor, begin: int, end: int) -> Tensor:
    """A view: what is done to it is done to the buffer."""
    return flow._C.slice_view_1d_contiguous(buffer, begin, end)

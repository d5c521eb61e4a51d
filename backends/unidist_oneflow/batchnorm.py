"""Batch normalisation over all ranks. OneFlow's own normalises the part of each rank by itself, in both views; it takes
a part of one row, and the running variance is not a number from then on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import oneflow as flow
from oneflow.nn.modules.batchnorm import _BatchNorm

from unidist.plugin import World, single_row

Tensor = Any


class SingleRow:
    """A hook before batch normalisation of this rank's rows alone."""

    def __init__(self, world: World) -> None:
        self._rank, self._size = world.rank, world.world_size

    def __call__(self, module: Any, inputs: tuple[Tensor, ...]) -> None:
        if module.training and inputs and inputs[0].ndim > 1 and inputs[0].numel() == inputs[0].shape[1]:
            raise single_row(self._rank, self._size)


def refuse_single_rows(model: Any, world: World) -> None:
    for module in model.modules():
        if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
            module.register_forward_pre_hook(SingleRow(world))


class _Sum(flow.autograd.Function):  # type: ignore[misc]  # OneFlow is not there to be checked
    """A differentiable sum over ranks: the gradient of each rank's part is the sum of all ranks' gradients."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return flow._C.local_all_reduce(x, inplace=False)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return flow._C.local_all_reduce(gradient.contiguous(), inplace=False)


class SyncBatchNorm(_BatchNorm):  # type: ignore[misc]  # OneFlow is not there to be checked
    """In training, statistics are those of the samples of all ranks together; otherwise plain batch normalisation."""

    is_padding: Callable[[], bool]  # whether this rank's rows are no samples, only there to take part

    def _check_input_dim(self, x: Tensor) -> None:
        if x.ndim < 2:
            raise ValueError(f"expected at least 2 dimensions, got {x.ndim}")

    def forward(self, x: Tensor) -> Tensor:
        self._check_input_dim(x)
        if not self.training:
            return super().forward(x)
        axes = [axis for axis in range(x.ndim) if axis != 1]
        exact = x.to(flow.float64)  # the difference of two large sums would be lost in float32
        total, squares = exact.sum(axes), (exact * exact).sum(axes)
        if x.is_global:  # the whole batch; its sums are parts of sums until somebody asks
            total, squares = (tensor.to_global(sbp=flow.sbp.broadcast) for tensor in (total, squares))
            rows = x.numel() / x.shape[1]
            spare = max(rows - 1, 1)
        else:
            sums = flow.cat([total, squares, flow.full((1,), x.numel() / x.shape[1], dtype=flow.float64).to(x.device)])
            nothing = flow.full((1,), float(self.is_padding())).to(x.device).to(flow.bool)
            whole = _Sum.apply(sums.masked_fill(nothing, 0.0))
            # A loss that weighs nothing has no gradient, though it may be NaN.
            whole.register_hook(lambda gradient: flow.zeros_like(gradient) if self.is_padding() else gradient)
            total, squares, rows = whole[: x.shape[1]], whole[x.shape[1] : -1], whole[-1:]
            spare = (rows - 1).clamp(min=1)
        mean = total / rows
        variance = (squares / rows - mean * mean).clamp(min=0.0)
        if self.track_running_stats:
            self._track(mean.detach().to(x.dtype), (variance * rows / spare).detach().to(x.dtype))
        shape = [1, -1] + [1] * (x.ndim - 2)
        normal = ((exact - mean.reshape(shape)) * flow.rsqrt(variance + self.eps).reshape(shape)).to(x.dtype)
        return normal * self.weight.reshape(shape) + self.bias.reshape(shape) if self.affine else normal

    def _track(self, mean: Tensor, variance: Tensor) -> None:
        """Only OneFlow's own operator can write to a buffer inside an nn.Graph: it is shown two rows that have this
        mean and this (unbiased) variance."""
        self.num_batches_tracked.add_(1)
        deviation = (variance / 2).sqrt()
        two_rows = flow.stack([mean - deviation, mean + deviation])
        flow._C.normalization(
            two_rows,
            self.running_mean,
            self.running_var,
            mean,  # this and the next only matter for the result, which nobody looks at
            variance,
            axis=1,
            epsilon=self.eps,
            momentum=self.momentum,
            is_training=True,
        )


def convert(module: Any, is_padding: Callable[[], bool]) -> Any:
    """The model with every batch normalisation in it replaced, parameters, buffers and hooks kept."""
    if isinstance(module, _BatchNorm):
        synced = SyncBatchNorm(
            module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats
        )
        synced.__dict__.update(module.__dict__)
        synced.is_padding = is_padding
        return synced
    for name, child in module._modules.items():  # not named_children: it leaves out a child's second name
        if child is not None:
            setattr(module, name, convert(child, is_padding))
    return module

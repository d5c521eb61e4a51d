"""Batch normalisation over all ranks. torch has it for GPUs only; this one also runs on CPUs."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from unidist.plugin import World, single_row


class SingleRow:
    """A hook before batch normalisation of this rank's rows alone: torch's own error does not say why there is one."""

    def __init__(self, world: World) -> None:
        self._rank, self._size = world.rank, world.world_size

    def __call__(self, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if module.training and inputs and inputs[0].dim() > 1 and inputs[0].numel() == inputs[0].shape[1]:
            raise single_row(self._rank, self._size)


def explain_single_rows(model: nn.Module, world: World) -> None:
    for module in model.modules():
        alone = isinstance(module, _BatchNorm) and not isinstance(module, (SyncBatchNorm, nn.SyncBatchNorm))
        if alone and not any(isinstance(hook, SingleRow) for hook in module._forward_pre_hooks.values()):
            module.register_forward_pre_hook(SingleRow(world))


class _Sum(torch.autograd.Function):  # type: ignore[misc]  # torch is not there to be checked
    """A differentiable sum over ranks: the gradient of each rank's part is the sum of all ranks' gradients."""

    @staticmethod
    def forward(context: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        result = x.clone()
        dist.all_reduce(result)
        return result

    @staticmethod
    def backward(context: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> torch.Tensor:
        return _Sum.forward(context, gradient.contiguous())


class SyncBatchNorm(_BatchNorm):  # type: ignore[misc]  # torch is not there to be checked
    """In training, statistics are those of the samples of all ranks together; otherwise plain batch normalisation."""

    all_reduce = staticmethod(_Sum.apply)
    is_padding = staticmethod(lambda: False)  # whether this rank's rows are no samples, only there to take part

    def _check_input_dim(self, x: torch.Tensor) -> None:
        if x.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {x.dim()}")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(x)
        if not self.training:
            return super().forward(x)
        axes = [axis for axis in range(x.dim()) if axis != 1]
        exact = x.double()  # the difference of two large sums would be lost in float32, and more so below
        rows = torch.full((1,), x.numel() / x.shape[1], dtype=exact.dtype, device=x.device)
        local_sums = torch.cat([exact.sum(axes), (exact * exact).sum(axes), rows])
        nothing = torch.full((1,), self.is_padding(), device=x.device)
        # One collective; its backward sums the gradients of all ranks' losses. A loss that weighs
        # nothing has no gradient, though it may be NaN.
        whole = self.all_reduce(local_sums.masked_fill(nothing, 0.0))
        whole.register_hook(lambda gradient: torch.zeros_like(gradient) if self.is_padding() else gradient)
        total, squares, count = whole.split([x.shape[1], x.shape[1], 1])
        mean = total / count
        variance = (squares / count - mean * mean).clamp(min=0)
        if self.track_running_stats:
            self._track(mean.detach(), variance.detach(), count.detach())
        shape = [1, -1] + [1] * (x.dim() - 2)
        normal = ((exact - mean.view(shape)) * torch.rsqrt(variance + self.eps).view(shape)).to(x.dtype)
        return normal * self.weight.view(shape) + self.bias.view(shape) if self.affine else normal

    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        with torch.no_grad():
            self.num_batches_tracked += 1
            share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            unbiased = variance * count / (count - 1).clamp(min=1)  # as torch does
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)


def convert(
    module: nn.Module,
    on_gpu: bool,
    is_padding: Callable[[], bool],
    all_reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> nn.Module:
    """The model with every batch normalisation in it replaced, parameters, buffers and hooks kept.

    `is_padding()` tells whether this rank has no samples. `all_reduce` is a differentiable sum over ranks.
    """
    if on_gpu and all_reduce is None:
        return nn.SyncBatchNorm.convert_sync_batchnorm(module)
    if isinstance(module, _BatchNorm):
        synced = SyncBatchNorm(
            module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats
        )
        synced.__dict__.update(module.__dict__)
        synced.is_padding = is_padding
        if all_reduce is not None:
            synced.all_reduce = all_reduce
        return synced
    for name, child in module._modules.items():  # not named_children: it leaves out a child's second name
        if child is not None:
            setattr(module, name, convert(child, on_gpu, is_padding, all_reduce))
    return module

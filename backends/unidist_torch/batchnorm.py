"""Batch normalisation over all ranks. torch has it for GPUs only; this one also runs on CPUs."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class _Sum(torch.autograd.Function):
    """A differentiable sum over ranks: the gradient of each rank's part is the sum of all ranks' gradients."""

    @staticmethod
    def forward(context, x):
        result = x.clone()
        dist.all_reduce(result)
        return result

    @staticmethod
    def backward(context, gradient):
        return _Sum.forward(context, gradient.contiguous())


class SyncBatchNorm(_BatchNorm):
    """In training, statistics are those of the samples of all ranks together; otherwise plain batch normalisation."""

    all_reduce = staticmethod(_Sum.apply)
    is_padding = staticmethod(lambda: False)  # whether this rank's rows are no samples, only there to take part

    def _check_input_dim(self, x):
        if x.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {x.dim()}")

    def forward(self, x):
        self._check_input_dim(x)
        if not self.training:
            return super().forward(x)
        axes = [axis for axis in range(x.dim()) if axis != 1]
        exact = x.double()  # the difference of two large sums would be lost in float32, and more so below
        rows = torch.full((1,), x.numel() / x.shape[1], dtype=exact.dtype, device=x.device)
        own = torch.cat([exact.sum(axes), (exact * exact).sum(axes), rows])
        # One collective; its backward sums the gradients of all ranks' losses.
        total, squares, count = self.all_reduce(own * (not self.is_padding())).split([x.shape[1], x.shape[1], 1])
        mean = total / count
        variance = (squares / count - mean * mean).clamp(min=0)
        if self.track_running_stats:
            self._track(mean.detach(), variance.detach(), count.detach())
        shape = [1, -1] + [1] * (x.dim() - 2)
        normal = ((exact - mean.view(shape)) * torch.rsqrt(variance + self.eps).view(shape)).to(x.dtype)
        return normal * self.weight.view(shape) + self.bias.view(shape) if self.affine else normal

    @torch.no_grad()
    def _track(self, mean, variance, count):
        self.num_batches_tracked += 1
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * count / (count - 1).clamp(min=1)  # as torch does
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)


def convert(module, on_gpu, is_padding, all_reduce=None):
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

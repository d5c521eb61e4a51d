"""Batch normalisation over all ranks. torch has it for GPUs only; this one also runs on CPUs."""

import torch
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.modules.batchnorm import _BatchNorm


class SyncBatchNorm(_BatchNorm):
    """In training, statistics are those of the rows of all ranks together; otherwise plain batch normalisation."""

    all_reduce = staticmethod(all_reduce)

    def _check_input_dim(self, x):
        if x.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {x.dim()}")

    def forward(self, x):
        self._check_input_dim(x)
        if not self.training:
            return super().forward(x)
        axes = [axis for axis in range(x.dim()) if axis != 1]
        rows = torch.full((1,), x.numel() / x.shape[1], dtype=x.dtype, device=x.device)
        # One differentiable collective: its backward sums the gradients of all ranks' losses.
        sums = self.all_reduce(torch.cat([x.sum(axes), (x * x).sum(axes), rows]))
        total, squares, count = sums.split([x.shape[1], x.shape[1], 1])
        mean = total / count
        variance = squares / count - mean * mean
        if self.track_running_stats:
            self._track(mean.detach(), variance.detach(), count.detach())
        shape = [1, -1] + [1] * (x.dim() - 2)
        normal = (x - mean.view(shape)) * torch.rsqrt(variance + self.eps).view(shape)
        return normal * self.weight.view(shape) + self.bias.view(shape) if self.affine else normal

    @torch.no_grad()
    def _track(self, mean, variance, count):
        self.num_batches_tracked += 1
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, share)
        self.running_var.lerp_(variance * count / (count - 1).clamp(min=1), share)  # unbiased, as torch does


def convert(module, on_gpu, all_reduce=None):
    """The model with every batch normalisation in it replaced, parameters and buffers kept.

    `all_reduce` is a differentiable sum over ranks; None: that of torch.distributed.
    """
    if on_gpu and all_reduce is None:
        return nn.SyncBatchNorm.convert_sync_batchnorm(module)
    if isinstance(module, _BatchNorm):
        synced = SyncBatchNorm(
            module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats
        )
        synced.__dict__.update({k: v for k, v in module.__dict__.items() if k not in ("_forward_hooks",)})
        if all_reduce is not None:
            synced.all_reduce = all_reduce
        return synced
    for name, child in module.named_children():
        setattr(module, name, convert(child, on_gpu, all_reduce))
    return module

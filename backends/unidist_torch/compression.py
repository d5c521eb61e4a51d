"""Gradients that travel lighter: DDP communication hooks. Each gets a bucket and returns the future of its mean."""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from unidist import PowerSGD, TopK


def register(model, compression) -> None:
    if compression == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif compression == "bf16":
        model.register_comm_hook(None, bfloat16)
    elif isinstance(compression, PowerSGD):
        state = powerSGD_hook.PowerSGDState(None, compression.rank, compression.start)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif isinstance(compression, TopK):
        model.register_comm_hook(None, Largest(compression.ratio))


def bfloat16(_, bucket):
    """torch has such a hook too, but lets it run on GPUs only."""
    size = dist.get_world_size()
    small = bucket.buffer().to(torch.bfloat16).div_(size)
    waiting = dist.all_reduce(small, async_op=True).get_future()
    return waiting.then(lambda done: bucket.buffer().copy_(done.value()[0]))


class Largest:
    """The largest part of each gradient travels; the rest waits here until it is large enough."""

    __name__ = "largest_part_hook"  # DDP looks at the name of a hook

    def __init__(self, ratio):
        self._ratio = ratio
        self._waiting = {}  # parameter -> what was not sent yet. Not by bucket: DDP rearranges them after a step

    def __call__(self, _, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        gradient, size = bucket.buffer(), dist.get_world_size()
        parameters = bucket.parameters()
        waiting = [self._waiting.get(p, torch.zeros_like(p)).reshape(-1) for p in parameters]
        gradient += torch.cat(waiting)
        count = max(1, int(self._ratio * gradient.numel()))
        chosen = torch.topk(gradient.abs(), count, sorted=False).indices
        values = gradient[chosen]
        gradient[chosen] = 0
        for parameter, rest in zip(parameters, gradient.split([p.numel() for p in parameters]), strict=True):
            self._waiting[parameter] = rest.clone().view_as(parameter)
        everyones = [torch.empty_like(values) for _ in range(size)], [torch.empty_like(chosen) for _ in range(size)]
        dist.all_gather(everyones[0], values)
        dist.all_gather(everyones[1], chosen)
        gradient.zero_()
        for theirs, where in zip(*everyones, strict=True):
            gradient.index_add_(0, where, theirs, alpha=1 / size)
        done = torch.futures.Future()
        done.set_result(gradient)
        return done

"""Gradients that travel lighter: DDP communication hooks. Each gets a bucket and returns the future of its mean."""

# DDP compares a hook's annotations with its classes, so they must not be left as text by `from __future__`.
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from unidist.plugin import Compression, PowerSGD, TopK

Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]


def register(model: DistributedDataParallel, compression: Compression, weights: nn.Parameter) -> None:
    """`weights` is a parameter that travels as it is, in a bucket of its own."""
    state: powerSGD_hook.PowerSGDState | Waiting | None = None
    hook: Hook
    if isinstance(compression, PowerSGD):
        state, hook = powerSGD_hook.PowerSGDState(None, compression.rank, compression.start), thin_matrices
    elif isinstance(compression, TopK):
        state, hook = Waiting(compression.ratio), largest_part
    else:
        hook = default_hooks.fp16_compress_hook if compression == "fp16" else bfloat16

    def spare_weights(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if not any(parameter is weights for parameter in bucket.parameters()):
            return hook(state, bucket)
        if isinstance(state, powerSGD_hook.PowerSGDState):
            state.maybe_increase_iter(bucket)  # it counts updates at the last bucket, which may be this one
        return default_hooks.allreduce_hook(None, bucket)

    model.register_comm_hook(state, spare_weights)


def bfloat16(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch has such a hook too, but lets it run on GPUs only."""
    size = dist.get_world_size()
    small = bucket.buffer().to(torch.bfloat16).div_(size)
    waiting = dist.all_reduce(small, async_op=True).get_future()
    return waiting.then(lambda done: bucket.buffer().copy_(done.value()[0]))


def thin_matrices(state: powerSGD_hook.PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's PowerSGD, finished before it returns. Its hook starts further all-reduces when others are done: those
    of several buckets would come in another order on each rank, and wait for each other for ever."""
    done = torch.futures.Future()
    done.set_result(powerSGD_hook.powerSGD_hook(state, bucket).wait())
    return done


class Waiting:
    """What was too small to be sent yet. By parameter, not by bucket: DDP rearranges buckets after the first step."""

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio
        self.rest: dict[nn.Parameter, torch.Tensor] = {}


@torch.no_grad()  # type: ignore[untyped-decorator]  # torch is not there to be checked
def largest_part(state: Waiting, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The largest part of each gradient travels; the rest waits until it is large enough."""
    gradient, size, parameters = bucket.buffer(), dist.get_world_size(), bucket.parameters()
    gradient += torch.cat([state.rest.get(p, torch.zeros_like(p)).reshape(-1) for p in parameters])
    count = max(1, int(state.ratio * gradient.numel()))
    chosen = torch.topk(gradient.abs(), count, sorted=False).indices
    values = gradient[chosen]
    gradient[chosen] = 0
    for parameter, rest in zip(parameters, gradient.split([p.numel() for p in parameters]), strict=True):
        state.rest[parameter] = rest.clone().view_as(parameter)
    all_values, all_chosen = ([torch.empty_like(sent) for _ in range(size)] for sent in (values, chosen))
    dist.all_gather(all_values, values)
    dist.all_gather(all_chosen, chosen)
    gradient.zero_()
    for theirs, where in zip(all_values, all_chosen, strict=True):
        gradient.index_add_(0, where, theirs, alpha=1 / size)
    done = torch.futures.Future()
    done.set_result(gradient)
    return done

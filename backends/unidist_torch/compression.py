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
        model.register_comm_hook(state, thin_matrices)
    elif isinstance(compression, TopK):
        model.register_comm_hook(Waiting(compression.ratio), largest_part)


def bfloat16(_, bucket):
    """torch has such a hook too, but lets it run on GPUs only."""
    size = dist.get_world_size()
    small = bucket.buffer().to(torch.bfloat16).div_(size)
    waiting = dist.all_reduce(small, async_op=True).get_future()
    return waiting.then(lambda done: bucket.buffer().copy_(done.value()[0]))


def thin_matrices(state, bucket):
    """torch's PowerSGD, finished before it returns. Its hook starts further all-reduces when others are done: those
    of several buckets would come in another order on each rank, and wait for each other for ever."""
    done = torch.futures.Future()
    done.set_result(powerSGD_hook.powerSGD_hook(state, bucket).wait())
    return done


class Waiting:
    """What was too small to be sent yet. By parameter, not by bucket: DDP rearranges buckets after the first step."""

    def __init__(self, ratio):
        self.ratio, self.rest = ratio, {}


@torch.no_grad()
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
    all_values, all_chosen = ([torch.empty_like(own) for _ in range(size)] for own in (values, chosen))
    dist.all_gather(all_values, values)
    dist.all_gather(all_chosen, chosen)
    gradient.zero_()
    for theirs, where in zip(all_values, all_chosen, strict=True):
        gradient.index_add_(0, where, theirs, alpha=1 / size)
    done = torch.futures.Future()
    done.set_result(gradient)
    return done

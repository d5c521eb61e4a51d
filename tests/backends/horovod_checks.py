"""What torch models over Horovod need beyond the promises, as further checks for real ranks. It is named as their zoo,
so that they import it."""

import numpy as np
import torch

from unidist import SGD, AdamW, PowerSGD, TopK
from unidist.errors import RanksDisagree, UnsupportedOperation
from unidist.testing.case import check, close, refused
from unidist_horovod import meeting
from unidist_torch.zoo import *  # noqa: F403

COMPRESSIONS = (None, "fp16", "bf16", TopK(0.1), PowerSGD(rank=1, start=2))


class Two(torch.nn.Module):
    """Two layers side by side, of which a loss may use one."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = torch.nn.Linear(6, 5), torch.nn.Linear(6, 5, dtype=dtype)

    def both(self, x):
        return self.a(x).double() + self.b(x.to(self.b.weight.dtype)).double()


def rows(case):
    """(this rank's, everybody's)"""
    whole = torch.arange(24.0 * case.size).reshape(-1, 6) / 24
    return whole[4 * case.rank : 4 * case.rank + 4], whole


def trained_alike(case, model):
    """Its second layer at least; and all of it is the same on every rank."""
    assert (model.b.weight != Two(model.b.weight.dtype).b.weight).any(), "not trained"
    mine = arrays(model.parameters())
    for theirs in case.strategy.all_gather(mine):
        close(theirs, mine, tolerance=0)


def serially(model, optimizer, losses):
    for loss in losses:
        loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.parameters()


def arrays(parameters):
    return [each.detach().double().numpy() for each in parameters]


@check
def parameters_that_no_rank_used(case):
    """Momentum and weight decay leave them alone, as in one process, also after steps in which they were used."""
    mine, whole = rows(case)
    model, optimizer = case.strategy.prepare(Two(), AdamW(0.1, weight_decay=0.1))
    for loss in (Two.both, Two.both, lambda m, x: m.a(x), lambda m, x: m.a(x)):
        case.strategy.train_step(model, optimizer, lambda m, x, loss=loss: loss(m, x).square().mean())(mine)
    alone = Two()
    losses = [lambda m: m.both(whole).square().mean()] * 2 + [lambda m: m.a(whole).square().mean()] * 2
    own = torch.optim.AdamW(alone.parameters(), lr=0.1, weight_decay=0.1)
    close(arrays(model.parameters()), arrays(serially(alone, own, losses)))


@check
def parameters_that_one_rank_used(case):
    for compression in COMPRESSIONS:
        model, optimizer = case.strategy.prepare(Two(), SGD(0.1, momentum=0.9), compression=compression)
        step = case.strategy.train_step(
            model, optimizer, lambda m, x: (m.both(x) if case.rank == 0 else m.a(x)).square().mean()
        )
        for _ in range(4):
            step(rows(case)[0])
        trained_alike(case, model)


@check
def gradients_that_no_rank_has(case):
    """average_gradients leaves them out."""
    model, optimizer = case.strategy.prepare(Two(), SGD(0.1, weight_decay=0.1), sync_every=0)
    with case.strategy.forward(model):
        loss = model.a(rows(case)[0]).square().mean() if case.rank else model.a.weight.sum()
    case.strategy.backward(loss)
    case.strategy.average_gradients(model)
    assert model.b.weight.grad is None
    assert model.a.bias.grad is not None  # rank 0 had none
    case.strategy.step(optimizer)
    assert torch.equal(model.b.weight, Two().b.weight)
    case.strategy.average_parameters(model)


@check
def buffers_outside_the_state(case):
    net = Two()
    net.register_buffer("mask", torch.full((3,), float(case.rank)), persistent=False)
    model, _ = case.strategy.prepare(net, SGD(0.1))
    assert torch.equal(model.mask, torch.zeros(3))


@check
def layers_thawed_and_frozen_later(case):
    mine, _ = rows(case)
    for compression in COMPRESSIONS:
        net = Two()
        net.b.requires_grad_(False)
        model, optimizer = case.strategy.prepare(
            net, torch.optim.SGD(net.parameters(), lr=0.1), compression=compression
        )
        step = case.strategy.train_step(model, optimizer, lambda m, x: m.both(x).square().mean())
        step(mine)
        net.b.requires_grad_(True)
        step(mine)
        step(mine)
        net.a.requires_grad_(False)
        then = net.a.weight.detach().clone()
        step(mine)
        assert torch.equal(net.a.weight, then)
        trained_alike(case, model)


@check
def parameters_of_two_dtypes(case):
    """Compressed, they agree and train; not compressed, the step is that of one process, to the dtype's precision."""
    mine, whole = rows(case)
    for dtype, tolerance in ((torch.float64, 2e-6), (torch.bfloat16, 2e-3)):
        for compression in COMPRESSIONS:
            model, optimizer = case.strategy.prepare(Two(dtype), SGD(0.01), compression=compression)
            step = case.strategy.train_step(model, optimizer, lambda m, x: m.both(x).square().mean())
            step(mine)
            if compression is None:
                alone = Two(dtype)
                own = torch.optim.SGD(alone.parameters(), lr=0.01)
                expected = serially(alone, own, [lambda m: m.both(whole).square().mean()])
                close(arrays(model.parameters()), arrays(expected), tolerance)
            for _ in range(3):
                step(mine)
            trained_alike(case, model)


@check
def bfloat16_averaged_by_hand(case):
    model, _ = case.strategy.prepare(Two(torch.bfloat16), SGD(0.01), sync_every=0)
    with torch.no_grad():
        model.b.weight.fill_(case.rank)
    case.strategy.average_parameters(model)
    assert (model.b.weight == (case.size - 1) / 2).all()


@check
def parameters_without_elements(case):
    for compression in COMPRESSIONS:
        net = Two()
        net.empty = torch.nn.Parameter(torch.zeros(0, 3))
        model, optimizer = case.strategy.prepare(net, SGD(0.1), compression=compression)
        step = case.strategy.train_step(model, optimizer, lambda m, x: m.both(x).square().mean() + m.empty.sum())
        for _ in range(4):
            step(rows(case)[0])
        trained_alike(case, model)


@check
def ranks_that_disagree(case):
    """Below the Strategy, which would see it first here: it does so only if UNIDIST_DEBUG is set."""
    with refused(RanksDisagree, "all_reduce sum: Mismatched"):
        case.backend.all_reduce(torch.ones(2 + case.rank), "sum")
    assert case.strategy.all_reduce(1, "sum") == case.size


@check
def collectives_in_pieces(case):
    """As they go beyond 1 GiB; here beyond 1000 bytes."""
    most, meeting.MOST_BYTES = meeting.MOST_BYTES, 1000
    wide = np.arange(1001, dtype=np.float64) + case.rank
    gathered, last = case.strategy.all_gather(wide), case.strategy.broadcast(wide, case.size - 1)
    torch.manual_seed(case.rank)
    first = torch.nn.Linear(20, 30)
    model, _ = case.strategy.prepare(first, SGD(0.1))
    torch.manual_seed(0)
    assert torch.equal(model.weight, torch.nn.Linear(20, 30).weight)
    meeting.MOST_BYTES = most
    assert [each[1000] for each in gathered] == [1000 + rank for rank in range(case.size)]
    assert all((np.diff(each) == 1).all() for each in (*gathered, last))
    assert last[0] == case.size - 1


@check
def dtypes_that_nothing_adds_up(case):
    with refused(UnsupportedOperation, "uint16", "int64"):
        case.strategy.all_reduce(torch.ones(2, dtype=torch.uint16), "sum")
    gathered = case.strategy.all_gather(torch.full((2,), case.rank, dtype=torch.uint16))
    assert [int(each[1]) for each in gathered] == list(range(case.size))

"""What torch models need beyond the promises, on whatever backend, as further checks for real ranks. It is named as
their zoo, so that they import it."""

import torch
from torch import nn

from unidist import SGD
from unidist.errors import StateError, UnsupportedOperation, UsageError
from unidist.testing.case import check, close, refused
from unidist_torch.zoo import *  # noqa: F403
from unidist_torch.zoo import cross_entropy

RATE = 0.5


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def rows(case, step=0, uneven=False):
    """(this rank's, everybody's)"""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(4 * case.size, 6, generator=generator)
    y = torch.randint(0, 3, (4 * case.size,), generator=generator)
    first = [4 * rank + 2 * uneven * (0 < rank < case.size) for rank in range(case.size + 1)]
    own = slice(first[case.rank], first[case.rank + 1])
    return (x[own], y[own]), (x, y)


def serially(model, parameters, batches, rate=RATE):
    optimizer = torch.optim.SGD(parameters(model), lr=rate)
    for batch in batches:
        model.zero_grad()
        cross_entropy(model, *batch).backward()
        optimizer.step()
    return arrays(model)


def arrays(model):
    return [each.detach().numpy().copy() for each in model.parameters()]


def stray(model):
    """A native backward through one layer, which is not the first."""
    model[2].weight.square().sum().backward()


def spelled_out(case, model, batch):
    with case.strategy.forward(model):
        loss = cross_entropy(model, *batch)
    case.strategy.backward(loss)


@check
def stray_gradient_of_any_layer(case):
    model, optimizer = case.strategy.prepare(net(), SGD(RATE))
    step = case.strategy.train_step(model, optimizer, cross_entropy)
    step(*rows(case)[0])
    stray(model)
    others = len(case.strategy._trainer.prepared) > 1  # then the step begins by clearing
    try:
        step(*rows(case, 1)[0])
    except StateError as error:
        assert "no step has computed" in str(error)  # noqa: PT017
        return
    assert others, "the stray gradient was used"
    close(arrays(model), serially(net(), nn.Module.parameters, [rows(case, n)[1] for n in range(2)]))


@check
def gradients_of_any_layer_touched_in_a_group(case):
    for touch in (stray, lambda model: model[2].zero_grad(), lambda model: model[2].bias.grad.mul_(2)):
        model, optimizer = case.strategy.prepare(net(), SGD(RATE), accumulate=2)
        step = case.strategy.train_step(model, optimizer, cross_entropy)
        step(*rows(case)[0])
        touch(model)
        with refused(StateError, "middle of an accumulation group"):
            step(*rows(case, 1)[0])
        for number in range(2):  # the group was given up, the next one is like any other
            step(*rows(case, number)[0])
        together = [torch.cat(parts) for parts in zip(rows(case, 0)[1], rows(case, 1)[1], strict=True)]
        close(arrays(model), serially(net(), nn.Module.parameters, [together]))


@check
def gradients_of_any_layer_cleared_before_the_update(case):
    model, optimizer = case.strategy.prepare(net(), SGD(RATE))
    spelled_out(case, model, rows(case)[0])
    model[2].zero_grad()
    with refused(StateError, "cleared between backward and step"):
        case.strategy.step(optimizer)


@check
def gradients_of_any_layer_cleared_before_a_flush(case):
    model, optimizer = case.strategy.prepare(net(), SGD(RATE), accumulate=2)
    step = case.strategy.train_step(model, optimizer, cross_entropy)
    step(*rows(case)[0])
    model[2].zero_grad()
    with refused(StateError, "cleared"):
        case.strategy.flush(model, optimizer)
    for _ in range(2):  # the next group is like any other
        step(*rows(case)[0])
    close(arrays(model), serially(net(), nn.Module.parameters, [rows(case)[1]]))


@check
def optimizer_of_a_part_of_the_model(case):
    """The other parameters have gradients too, which no later step may find."""
    for accumulate in (1, 2):
        model = net()
        model, optimizer = case.strategy.prepare(
            model, torch.optim.SGD(model[2].parameters(), lr=RATE), accumulate=accumulate
        )
        step = case.strategy.train_step(model, optimizer, cross_entropy)
        for number in range(3):
            for _ in range(accumulate):
                step(*rows(case, number, uneven=True)[0])
        assert all(each.grad is None for each in model.parameters())
        expected = serially(net(), lambda m: m[2].parameters(), [rows(case, n)[1] for n in range(3)])
        close(arrays(model), expected)


def unused(m, x, y):
    return cross_entropy(m[2:], m[0](x).tanh().detach(), y)


@check
def parameter_without_a_gradient(case):
    """DDP would make the first update with gradients that are not exchanged. Horovod exchanges them all the same."""
    for accumulate in (1, 2):
        for frozen in (False, True):
            model, optimizer = case.strategy.prepare(net(), SGD(RATE), accumulate=accumulate)
            step = case.strategy.train_step(model, optimizer, cross_entropy)
            for number in range(accumulate):
                step(*rows(case, number)[0])
            now = arrays(model)
            if frozen:
                model[0].requires_grad_(False)
            last = step if frozen else case.strategy.train_step(model, optimizer, unused)
            for _ in range(accumulate - 1):
                step(*rows(case, 3)[0])
            if case.strategy.backend == "torch":
                with refused(StateError, "parameter 0.weight", "find_unused_parameters", "before prepare"):
                    last(*rows(case, 4)[0])
                close(arrays(model), now, tolerance=0)
                model[0].requires_grad_(True)
                model, optimizer = case.strategy.prepare(model, SGD(RATE))
                case.strategy.train_step(model, optimizer, cross_entropy)(*rows(case, 3)[0])
            else:
                last(*rows(case, 4)[0])
            alike(case, model)


def alike(case, model):
    mine = arrays(model)
    for theirs in case.strategy.all_gather({"p": mine}):
        close(theirs["p"], mine, tolerance=0)


@check
def parameters_that_are_used_in_unusual_ways(case):
    """Shared by two layers, or without elements."""

    class Unusual(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.first, self.last, self.empty = nn.Linear(6, 6), nn.Linear(6, 3), nn.Parameter(torch.zeros(0, 3))
            self.again = self.first

        def forward(self, x):
            return self.last(self.again(self.first(x).tanh())) + self.empty.sum()

    for accumulate in (1, 2):
        model, optimizer = case.strategy.prepare(Unusual(), SGD(RATE), accumulate=accumulate)
        step = case.strategy.train_step(model, optimizer, cross_entropy)
        for number in range(3):
            for _ in range(accumulate):
                step(*rows(case, number, uneven=True)[0])
        expected = serially(Unusual(), nn.Module.parameters, [rows(case, n)[1] for n in range(3)])
        close(arrays(model), expected)


@check
def everything_frozen_and_one_layer_thawed(case):
    model = net().requires_grad_(False)
    model, optimizer = case.strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE))
    step = case.strategy.train_step(model, optimizer, cross_entropy)
    with refused(UsageError, "no gradient"):
        step(*rows(case)[0])
    model[2].requires_grad_(True)
    if case.strategy.backend == "torch":
        with refused(StateError, "parameter 2.weight was unfrozen"):
            step(*rows(case)[0])
        model, optimizer = case.strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE))
        step = case.strategy.train_step(model, optimizer, cross_entropy)
    step(*rows(case)[0])
    close(arrays(model), serially(net(), lambda m: m[2].parameters(), [rows(case)[1]]))


@check
def thawed_and_prepared_again(case):
    model = net()
    model[0].requires_grad_(False)
    model, optimizer = case.strategy.prepare(model, SGD(RATE))
    case.strategy.train_step(model, optimizer, cross_entropy)(*rows(case, 0, uneven=True)[0])
    model[0].requires_grad_(True)
    model, optimizer = case.strategy.prepare(model, SGD(RATE))
    case.strategy.train_step(model, optimizer, cross_entropy)(*rows(case, 1, uneven=True)[0])
    expected = net()
    serially(expected, lambda m: m[2].parameters(), [rows(case, 0)[1]])
    close(arrays(model), serially(expected, nn.Module.parameters, [rows(case, 1)[1]]))


@check
def static_graph_without_an_exchange_in_each_backward(case):
    """Run with the option static_graph."""
    for how in ({"accumulate": 2}, {"sync_every": 2}, {"sync_every": 0}):
        with refused(UsageError, "static_graph", "accumulate="):
            case.strategy.prepare(net(), SGD(RATE), **how)
    model, optimizer = case.strategy.prepare(net(), SGD(RATE))
    step = case.strategy.train_step(model, optimizer, cross_entropy)
    for number in range(3):
        step(*rows(case, number, uneven=True)[0])
    close(arrays(model), serially(net(), nn.Module.parameters, [rows(case, n)[1] for n in range(3)]))


@check
def models_and_optimizers_that_prepare_refuses(case):
    prepare = case.strategy.prepare
    model = net()
    with refused(UsageError, "LBFGS", "closure"):
        prepare(model, torch.optim.LBFGS(model.parameters()))
    lazy = nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 3))
    with refused(UsageError, "0.weight", "call the model once"):
        prepare(lazy, SGD(RATE))
    sparse = nn.Sequential(nn.Embedding(5, 3, sparse=True))
    with refused(UnsupportedOperation, "layer 0", "sparse=False"):
        prepare(sparse, SGD(RATE))
    sparse.requires_grad_(False)
    prepare(nn.Sequential(sparse, nn.Linear(3, 3)), SGD(RATE))
    lazy(torch.zeros(1, 6))
    model, optimizer = prepare(lazy, torch.optim.Adagrad(lazy.parameters()))
    case.strategy.train_step(model, optimizer, cross_entropy)(*rows(case)[0])
    alike(case, model)


@check
def clipping_of_the_loops_own(case):
    """Exact where gradients are complete after backward, whatever the batches weigh; refused where they are not."""
    for accumulate in (1, 2):
        for clip in (nn.utils.clip_grad_norm_, by_value):
            model, optimizer = case.strategy.prepare(net(), SGD(RATE), accumulate=accumulate)
            alone = net()
            own = torch.optim.SGD(alone.parameters(), lr=RATE)
            for number in range(3):
                for turn in range(accumulate):
                    spelled_out(case, model, rows(case, number, uneven=True)[0])
                    if turn == accumulate - 1:
                        clip(model.parameters(), 0.1)
                    case.strategy.step(optimizer)
                own.zero_grad()
                cross_entropy(alone, *rows(case, number)[1]).backward()
                clip(alone.parameters(), 0.1)
                own.step()
            close(arrays(model), arrays(alone))


def by_value(parameters, most):
    """As many loops have it. Such a change cannot be noticed."""
    for each in parameters:
        each.grad.data.clamp_(-most, most)


@check
def clipping_of_gradients_that_are_not_complete(case):
    model, optimizer = case.strategy.prepare(net(), SGD(RATE))
    before = arrays(model)
    with case.strategy.forward(model):
        loss = nn.functional.cross_entropy(model(rows(case)[0][0]), rows(case)[0][1], reduction="sum")
    case.strategy.backward(loss, reduction="sum")
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with refused(StateError, "clip_norm=", "weighted"):
        case.strategy.step(optimizer)
    close(arrays(model), before, tolerance=0)
    spelled_out(case, model, rows(case)[0])  # the next step is like any other
    case.strategy.step(optimizer)
    close(arrays(model), serially(net(), nn.Module.parameters, [rows(case)[1]]))
    model, optimizer = case.strategy.prepare(net(), SGD(RATE), precision="fp16")
    spelled_out(case, model, rows(case)[0])
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with refused(StateError, "clip_norm=", "fp16"):
        case.strategy.step(optimizer)
    model, optimizer = case.strategy.prepare(net(), SGD(RATE), accumulate=2)
    case.strategy.train_step(model, optimizer, cross_entropy)(*rows(case)[0])
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with refused(StateError, "clip_norm="):
        case.strategy.flush(model, optimizer)

"""Checkpoints of what only torch has: its own optimizers and what they keep, and modules that hold more than arrays."""

import contextlib
import copy

import numpy as np
import torch
from torch import nn

from unidist import SGD
from unidist.checkpoint import read, write
from unidist.errors import CheckpointError, UnsupportedOperation
from unidist.testing.case import check, close, refused
from unidist_torch.zoo import *  # noqa: F403


class Run:
    def __init__(self, case, make, net=None):
        torch.manual_seed(1)
        net = net or nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        self.strategy = case.strategy
        self.model, self.optimizer = case.strategy.prepare(net, make(net.parameters()))
        self.step = case.strategy.train_step(self.model, self.optimizer, lambda m, x, y: ((m(x) - y) ** 2).mean())
        self.parts = {"model": self.model, "optimizer": self.optimizer}

    def train(self, steps=2):
        generator = torch.Generator().manual_seed(self.strategy.rank)
        for _ in range(steps):
            self.step(torch.randn(8, 3, generator=generator), torch.randn(8, 2, generator=generator), weight=8)
        return self


def rewritten(case, place, arrays=None, state=None, group=None):
    """A copy of the checkpoint with other arrays, plain values of the optimizer, or settings of its first group."""
    to = case.folder / "rewritten"
    with case.strategy.main_first():
        if case.rank == 0:
            found = read(place)
            values = copy.deepcopy(found.values)
            values["unidist"]["optimizer"]["groups"][0].update(group or {})
            values["unidist"]["optimizer"].setdefault("state", {}).update(state or {})
            write(to, {**found.arrays, **(arrays or {})}, values)
    return to


@check
def settings_that_an_optimizer_could_not_go_on_with(case):
    """Each of them would be a raw error in the next step, or, as a beta of 1, a step to nowhere."""
    adam, rmsprop = torch.optim.Adam, torch.optim.RMSprop
    for kind, group in (
        (adam, {"amsgrad": True}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (rmsprop, {"centered": True}),
        (rmsprop, {"momentum": 0.9}),
        (adam, {"betas": (1.0, 1.0)}),
        (adam, {"betas": [0.9, 5]}),
        (adam, {"betas": [0.9, 1.0]}),
        (adam, {"lr": None}),
    ):
        run = Run(case, lambda parameters, kind=kind: kind(parameters, lr=0.01)).train()
        case.strategy.save(case.folder / "settings", **run.parts)
        before = case.parameters(run.model)
        groups = repr(run.optimizer.param_groups[0]["betas" if kind is adam else "lr"])
        with refused(CheckpointError, "the optimizer"):
            case.strategy.load(rewritten(case, case.folder / "settings", group=group), **run.parts)
        close(case.parameters(run.model), before, tolerance=0)
        assert repr(run.optimizer.param_groups[0]["betas" if kind is adam else "lr"]) == groups
        run.train(1)


@check
def state_that_an_optimizer_could_not_go_on_with(case):
    run = Run(case, lambda parameters: torch.optim.Adam(parameters, lr=0.01)).train()
    case.strategy.save(case.folder / "state", **run.parts)
    for state in ({"0.weight/exp_avg": 3}, {"0.weight/step": "x"}):
        with refused(CheckpointError, "the optimizer's 0.weight/"):
            case.strategy.load(rewritten(case, case.folder / "state", state=state), **run.parts)
    run = Run(case, lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.9)).train()
    case.strategy.save(case.folder / "state", **run.parts)
    for shape in ((1,), (4,), (2, 4, 3)):
        arrays = {"optimizer/0.weight/square_avg": np.ones(shape, np.float32)}
        with refused(CheckpointError, "the optimizer's 0.weight/"):
            case.strategy.load(rewritten(case, case.folder / "state", arrays=arrays), **run.parts)
    case.strategy.load(case.folder / "state", **run.parts)
    run.train(1)


PLAIN = ("Adagrad", "NAdam", "RAdam", "ASGD", "Rprop", "Adadelta", "Adamax", "Adafactor")
OPTIMIZERS = {
    **{name: {"lr": 0.01} for name in PLAIN},
    "RMSprop": {"lr": 0.01, "centered": True, "momentum": 0.9},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "AdamW": {"lr": torch.tensor(0.01)},
    "SGD": {"lr": 0.01, "momentum": 0.9, "nesterov": True},
}


@check
def every_optimizer_of_torch_goes_on_where_it_was(case):
    """Whatever it keeps for a parameter: rows and columns, counts, tensors that hold one number, a rate in a tensor."""
    for name, how in OPTIMIZERS.items():
        kind = getattr(torch.optim, name, None)
        if kind is None:  # Adafactor came with torch 2.5
            continue
        place = case.folder / name
        first = Run(case, lambda parameters, kind=kind, how=how: kind(parameters, **copy.deepcopy(how))).train()
        case.strategy.save(place, **first.parts)
        other = {**how, "lr": how["lr"] * 2}
        second = Run(case, lambda parameters, kind=kind, how=other: kind(parameters, **copy.deepcopy(how))).train(1)
        case.strategy.load(place, **second.parts)
        close(case.parameters(second.train().model), case.parameters(first.train().model), tolerance=0)


class Counting(nn.Module):
    def __init__(self, extra):
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.extra = extra

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, extra):
        self.extra = extra


@check
def modules_that_hold_more_than_arrays(case):
    """What get_extra_state gives would be lost, or read and not put back: refused before the training."""
    for extra in ({"count": 7}, torch.tensor(7)):
        with refused(UnsupportedOperation, "_extra_state", "register_buffer"):
            case.strategy.prepare(nn.Sequential(Counting(extra)), SGD(0.1))
        with refused(UnsupportedOperation, "_extra_state", "register_buffer"):
            case.strategy.save(case.folder / "extra", model=nn.Sequential(Counting(extra)))


TIED = {"model/a.weight", "model/b.weight"}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.b.weight = self.a.weight


def changed(case, model, change):
    """A checkpoint of the model, with its arrays changed."""
    place = case.folder / "changed"
    case.strategy.save(place, model=model)
    with case.strategy.main_first():
        if case.rank == 0:
            found = read(place)
            arrays = dict(found.arrays)
            change(arrays)
            write(place, arrays, found.values)
    return place


@check
def two_arrays_for_one_of_the_model(case):
    model = case.strategy.prepare(Tied())
    before = case.parameters(model)
    place = changed(case, model, lambda arrays: arrays.update({"model/a.weight": arrays["model/a.weight"] + 1}))
    with refused(CheckpointError, "a.weight and b.weight are one array"):
        case.strategy.load(place, model=model)
    close(case.parameters(model), before, tolerance=0)
    both = changed(case, model, lambda arrays: arrays.update(dict.fromkeys(arrays.keys() & TIED, np.ones((3, 3)))))
    case.strategy.load(both, model=model)
    assert (case.parameters(model)[0] == 1).all()


@check
def batch_normalisation_without_its_count(case):
    """MXNet keeps none. Where there is no momentum, the next batch would take the place of all those before it."""
    for momentum in (0.1, None):
        model = case.strategy.prepare(nn.Sequential(nn.BatchNorm1d(3, momentum=momentum)))
        place = changed(case, model, lambda arrays: arrays.pop("model/0.num_batches_tracked"))
        with refused(CheckpointError, "0.num_batches_tracked") if momentum is None else contextlib.nullcontext():
            case.strategy.load(place, model=model)

"""What test_oneflow.py runs on ranks: importable where pytest is not installed, and before oneflow is."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import unidist
from unidist.testing import reference


def in_mirrored_view(folder: str) -> dict[str, Any]:
    # Started in the background of a shell, a process ignores SIGINT from the beginning, and so do its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with unidist.Strategy() as strategy:
        return {
            "curve": curve(strategy),
            **in_any_view(strategy, folder),
            "interrupted": interrupted(),
            "data loaders": data_loaders_taken_over(strategy),
            "dropout": dropout_resumed(strategy, folder),
        }


def in_consistent_view(folder: str) -> dict[str, Any]:
    with unidist.Strategy() as strategy:
        return {
            "curve": curve(strategy),
            **in_any_view(strategy, folder),
            "untraceable": model_that_cannot_be_traced(strategy),
            "seen": what_users_see(strategy),
            "batches tracked": batches_tracked(strategy),
            "modes": layers_that_change_their_mode(strategy),
            "dropout": dropout_resumed(strategy, folder),
        }


def in_any_view(strategy: unidist.Strategy, folder: str) -> dict[str, Any]:
    return {
        "dtypes": dtypes(strategy),
        "gradients taken away": gradients_taken_away(strategy),
        "gradients changed": gradients_changed_in_a_group(strategy),
        "memory": memory_of_steps_that_nobody_waits_for(strategy),
        "frozen late": frozen_late(strategy),
        "changed deep inside": changed_deep_inside(strategy),
        "nothing to train": nothing_to_train(strategy),
        "two steps": two_steps_that_share_a_group(strategy),
        "two models": two_models(strategy),
        "odd batches": odd_batches(strategy),
        "optimizers": {kind: optimized(strategy, kind, f"{folder}-{kind}") for kind in OPTIMIZERS},
    }


def without_graph() -> dict[str, Any]:
    with unidist.Strategy() as strategy:
        return {"curve": curve(strategy), "batches tracked": batches_tracked(strategy)}


def train(strategy: unidist.Strategy, model: Any, loss_fn: Any, samples: int = 22) -> list[float]:
    """Two passes with an uneven end."""
    model, optimizer = strategy.prepare(model, unidist.SGD(0.3, momentum=0.9))
    step = strategy.train_step(model, optimizer, loss_fn)
    loader = strategy.loader(reference.data(samples), per_device_batch=4)
    return [strategy.mean(step(x, y)) for _ in range(2) for x, y in loader]


def mlp(strategy: unidist.Strategy) -> Any:
    from unidist_oneflow import zoo

    model, backend = zoo.mlp(), strategy._backend
    backend.load_state(model, dict(zip(backend.state(model), reference.weights(), strict=True)))
    return model


def curve(strategy: unidist.Strategy) -> list[float]:
    from unidist_oneflow import zoo

    return train(strategy, mlp(strategy), zoo.cross_entropy)


def model_that_cannot_be_traced(strategy: unidist.Strategy) -> tuple[list[float], str]:
    """The losses, and what was said."""
    from unidist_oneflow import zoo

    def loss_fn(model: Any, x: Any, y: Any) -> Any:
        loss = zoo.cross_entropy(model, x, y)
        float(loss.detach().numpy()) if x.is_local else loss.item()  # a graph has no values yet
        return loss

    with contextlib.redirect_stderr(io.StringIO()) as heard, contextlib.redirect_stdout(heard):
        return train(strategy, mlp(strategy), loss_fn), heard.getvalue()


def what_users_see(strategy: unidist.Strategy) -> dict[str, Any]:
    import oneflow as flow

    from unidist_oneflow import zoo

    model, optimizer = strategy.prepare(mlp(strategy), unidist.SGD(0.1))
    step = strategy.train_step(model, optimizer, zoo.cross_entropy)
    x, y = (strategy._backend.from_numpy(each) for each in reference.data(4))
    loss = step(x, y)
    twice = zoo.mlp()
    twice.to_global(placement=flow.placement.all("cpu"), sbp=flow.sbp.broadcast)
    return {
        "the model is global": all(parameter.is_global for parameter in model.parameters()),
        "the loss is local": loss.is_local,
        "a reduced loss is local": strategy.all_reduce(loss).is_local,
        "global before": refusal(lambda: strategy.prepare(twice, unidist.SGD(0.1))),
        "prepared twice": refusal(lambda: strategy.prepare(model, unidist.SGD(0.1))),
    }


def batches_tracked(strategy: unidist.Strategy) -> int:
    """The count of batches in a batch normalisation, after two steps on whole batches and one on an uneven one."""
    from unidist_oneflow import zoo

    model, optimizer = strategy.prepare(zoo.with_buffers(), unidist.SGD(0.1))
    step = strategy.train_step(model, optimizer, zoo.cross_entropy)
    for x, y in strategy.loader(reference.data(4 * strategy.world_size * 2 + 5), per_device_batch=4):
        step(x, y)
    return int(strategy._backend.state(model)["1.num_batches_tracked"].numpy())


def layers_that_change_their_mode(strategy: unidist.Strategy) -> float:
    """How far the running mean moved after the batch normalisation was put into evaluation mode. (One more layer has
    nothing to do with the loss, which must not matter.)"""
    from oneflow import nn

    from unidist_oneflow import zoo

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.normal, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
            self.unused = nn.Linear(2, 2)

        def forward(self, x: Any) -> Any:
            return self.last(self.normal(self.first(x)))

    with contextlib.redirect_stderr(io.StringIO()):  # the ranks begin differently
        model, optimizer = strategy.prepare(Net(), unidist.SGD(0.1))
    step = strategy.train_step(model, optimizer, zoo.cross_entropy)
    x, y = (strategy._backend.from_numpy(each) for each in reference.data(4))
    step(x, y)
    model.normal.eval()
    before = strategy._backend.state(model)["normal.running_mean"].numpy().copy()
    step(x, y)
    return float(abs(strategy._backend.state(model)["normal.running_mean"].numpy() - before).max())


def dropout_resumed(strategy: unidist.Strategy, folder: str) -> tuple[list[float], list[float]]:
    """Losses after a checkpoint, and those of a run that was resumed from it."""
    from oneflow import nn

    from unidist_oneflow import zoo

    x, y = (strategy._backend.from_numpy(each) for each in reference.data(4))

    def make() -> Any:
        model, optimizer = strategy.prepare(
            nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4)), unidist.SGD(0.1)
        )
        step = strategy.train_step(model, optimizer, zoo.cross_entropy)
        return {"model": model, "optimizer": optimizer}, lambda: float(step(x, y).numpy())

    with contextlib.redirect_stderr(io.StringIO()):  # the ranks begin differently; dropout is not compiled
        (parts, step), (others, other_step) = make(), make()
    step()
    strategy.save(folder, **parts)
    losses = [step() for _ in range(3)]
    strategy.load(folder, **others)
    return losses, [other_step() for _ in range(3)]


def dtypes(strategy: unidist.Strategy) -> dict[str, Any]:
    """float16 and bfloat16 would abort the process inside OneFlow's own all_reduce and broadcast."""
    import oneflow as flow

    from unidist_oneflow import zoo

    results: dict[str, Any] = {}
    for dtype in (flow.float16, flow.bfloat16, flow.int8, flow.bool):
        own = flow.ones(3).to(dtype)
        for op in ("sum", "min", "max"):
            results[f"{dtype} {op}"] = strategy.all_reduce(own, op).to(flow.float32).numpy().tolist()
        results[f"{dtype} broadcast"] = strategy.broadcast(own).to(flow.float32).numpy().tolist()
    results["int16"] = refusal(lambda: strategy._backend.from_numpy(np.zeros(2, np.int16)))
    results["float16 model"] = refusal(lambda: strategy.prepare(zoo.mlp().to(flow.float16), unidist.SGD(0.1)))
    frozen = zoo.mlp().to(flow.float16).requires_grad_(False)
    results["frozen float16"] = refusal(
        lambda: strategy.prepare(flow.nn.Sequential(frozen, flow.nn.Linear(4, 4)), unidist.SGD(0.1))
    )
    model, optimizer = strategy.prepare(mlp(strategy).to(flow.float64), unidist.SGD(0.3))
    step = strategy.train_step(model, optimizer, zoo.cross_entropy)
    x, y = reference.data(4 * strategy.world_size)
    loader = strategy.loader((x.astype(np.float64), y), per_device_batch=4, keep_float64=True)
    step(*next(iter(loader)))
    serial = reference.Serial(reference.weights(), unidist.SGD(0.3))
    serial.step(x, y)
    state = [strategy._backend.to_numpy(each) for each in strategy._backend.state(model).values()]
    results["float64 error"] = max(abs(a - b).max() for a, b in zip(state, serial.parameters, strict=True))
    return results


def gradients_taken_away(strategy: unidist.Strategy) -> list[str]:
    """All of them, or only the last."""
    from unidist_oneflow import zoo

    def take_all(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=True)

    def take_last(model: Any, optimizer: Any) -> None:
        list(strategy._backend._prepared[model].named.values())[-1].grad = None

    said = []
    for take in (take_all, take_last):
        model, optimizer = strategy.prepare(mlp(strategy), unidist.SGD(0.1))
        step = strategy.train_step(model, optimizer, zoo.cross_entropy)
        take(model, optimizer)
        said.append(refusal(lambda step=step: step(*own_batch(strategy, 0))))
    return said


def gradients_changed_in_a_group(strategy: unidist.Strategy) -> dict[str, str]:
    """Most of them are zero, as those of an embedding of which a batch uses little."""
    import oneflow as flow

    embedding = flow.nn.Embedding(5000, 3)
    with contextlib.redirect_stderr(io.StringIO()):  # the ranks begin differently
        model, optimizer = strategy.prepare(embedding, unidist.SGD(0.1), accumulate=3)
    step = strategy.train_step(model, optimizer, lambda m, rows: m(rows).sum())
    rows = flow.tensor([17, 4001])
    (parameter,) = strategy._backend._prepared[model].named.values()

    def group(change: Callable[[], Any]) -> None:
        for number in range(3):
            step(rows)
            if number == 0:
                change()

    def clear_and_flush() -> None:
        step(rows)
        step(rows)
        optimizer.zero_grad()
        strategy.flush(model, optimizer)

    ways: dict[str, Callable[[], Any]] = {
        "zero_grad": optimizer.zero_grad,
        "zero_": lambda: parameter.grad.zero_(),
        "detached": lambda: parameter.grad.detach().mul_(0.5),
        "nothing": lambda: None,
        "looking": lambda: parameter.grad.numpy(),
    }
    if strategy._backend.options.view == "mirrored":  # in the other one the model's tensors have none
        ways["model.zero_grad"] = model.zero_grad
    said = {how: refusal(lambda change=change: group(change)) for how, change in ways.items()}
    held = parameter.grad
    return {**said, "held": refusal(lambda: group(held.zero_)), "flush": refusal(clear_and_flush)}


def memory_of_steps_that_nobody_waits_for(strategy: unidist.Strategy) -> tuple[int, int]:
    """Pages after 400 and after 6,400 steps."""
    from unidist_oneflow import zoo

    model, optimizer = strategy.prepare(mlp(strategy), unidist.SGD(0.1))
    step = strategy.train_step(model, optimizer, zoo.cross_entropy)
    batch, held = own_batch(strategy, 0), []
    for steps in (400, 6000):
        for _ in range(steps):
            step(*batch)
        held.append(int(Path("/proc/self/statm").read_text().split()[1]))
    return held[0], held[1]


def frozen_late(strategy: unidist.Strategy) -> list[str]:
    """After prepare: a parameter is frozen, and one is unfrozen."""
    import oneflow as flow

    from unidist_oneflow import zoo

    said = []
    for frozen in (True, False):
        model = mlp(strategy)
        next(model.parameters()).requires_grad_(frozen)
        model, optimizer = strategy.prepare(model, flow.optim.SGD(model.parameters(), lr=0.1))
        step = strategy.train_step(model, optimizer, zoo.cross_entropy)
        step(*own_batch(strategy, 0))
        next(model.parameters()).requires_grad_(not frozen)
        said.append(refusal(lambda step=step: step(*own_batch(strategy, 0))))
    return said


def changed_deep_inside(strategy: unidist.Strategy) -> list[str]:
    """One of many layers is unfrozen, or frozen: the next step is refused."""
    from oneflow import nn

    from unidist_oneflow import zoo

    said = []
    for trained, by_assignment in itertools.product((False, True), repeat=2):
        deep = nn.Sequential(*(nn.Linear(6, 6) for _ in range(30)))
        deep[17].requires_grad_(trained)
        with contextlib.redirect_stderr(io.StringIO()):  # the ranks begin differently
            model, optimizer = strategy.prepare(deep, unidist.SGD(0.1))
        step = strategy.train_step(model, optimizer, zoo.cross_entropy)
        step(*own_batch(strategy, 0))
        if by_assignment:
            model[17].bias.requires_grad = not trained
        else:
            model[17].requires_grad_(not trained)
        said.append(refusal(lambda step=step: step(*own_batch(strategy, 0))))
    return said


def batches_that_come_to_differ(where: str) -> list[float]:
    """Hand-made batches that lose a row: on "one" rank, on "all", or on "all, then one"."""
    with unidist.Strategy() as strategy, contextlib.redirect_stderr(io.StringIO()):
        from unidist_oneflow import agreement, zoo

        agreement.PATIENCE = 3.0
        model, optimizer = strategy.prepare(mlp(strategy), unidist.SGD(0.1))
        step = strategy.train_step(model, optimizer, zoo.cross_entropy)
        for number in range(6):
            on_all, on_one = number == 2 and where != "one", number == 3 and where != "all" and strategy.rank == 1
            step(*(each[: 4 - (on_all or on_one)] for each in own_batch(strategy, number % 4)))
        return flat_state(strategy, model)


def nothing_to_train(strategy: unidist.Strategy) -> str:
    import oneflow as flow

    model = mlp(strategy).requires_grad_(False)
    return refusal(lambda: strategy.prepare(model, flow.optim.SGD(model.parameters(), lr=0.1)))


def two_steps_that_share_a_group(strategy: unidist.Strategy) -> list[float]:
    """The parameters after an update for which each of two training steps gave one batch."""
    from unidist_oneflow import zoo

    model, optimizer = strategy.prepare(mlp(strategy), unidist.SGD(0.3), accumulate=2)
    one = strategy.train_step(model, optimizer, zoo.cross_entropy)
    other = strategy.train_step(model, optimizer, lambda *given: 2 * zoo.cross_entropy(*given))
    one(*own_batch(strategy, 0))
    other(*own_batch(strategy, 1))
    return flat_state(strategy, model)


def two_models(strategy: unidist.Strategy) -> list[float]:
    """The parameters of two models, each of which is trained through the other one, with an uneven end."""
    import oneflow as flow
    from oneflow import nn

    from unidist_oneflow import zoo

    flow.manual_seed(5)
    parts = [strategy.prepare(each, unidist.SGD(0.1)) for each in (nn.Linear(6, 400), nn.Linear(400, 4))]
    (first, _), (last, _) = parts

    def loss_fn(model: Any, x: Any, y: Any) -> Any:
        return zoo.cross_entropy(nn.Sequential(first, last), x, y)

    steps = [strategy.train_step(*part, loss_fn) for part in parts]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x, y in strategy.loader(reference.data(8 * strategy.world_size * 4 + 3), per_device_batch=4):
            for step in steps:
                step(x, y)
    return flat_state(strategy, first)[:600] + flat_state(strategy, last)


OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("SGD", {}),
    "nesterov": ("SGD", {"momentum": 0.9, "nesterov": True}),
    "adam": ("Adam", {}),
    "adamw": ("AdamW", {"betas": (0.8, 0.9)}),
    "amsgrad": ("Adam", {"amsgrad": True}),
    "amsgrad, later": ("Adam", {}),
    "rmsprop": ("RMSprop", {}),
}


class Optimized(NamedTuple):
    before: list[float]  # parameters
    after: list[float]  # a few updates, with settings that change
    resumed: list[float]  # the same updates again, from a checkpoint
    traced: int  # calls of the loss function, at first one for each of two updates
    gradients_seen: bool  # outside of the graph


def optimized(strategy: unidist.Strategy, kind: str, folder: str) -> Optimized:
    """One layer has nothing to do with the loss, and the groups have rates of their own."""
    import oneflow as flow
    from oneflow import nn

    from unidist_oneflow import zoo

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = mlp(strategy), nn.Linear(2, 2)

        def forward(self, x: Any) -> Any:
            return self.used(x)

    flow.manual_seed(7)
    net = Net()
    name, settings = OPTIMIZERS[kind]
    groups = [{"params": net.used.parameters(), "lr": 0.1}, {"params": net.unused.parameters()}]
    own = getattr(flow.optim, name)(groups, lr=0.2, weight_decay=0.01, **settings)
    model, optimizer = strategy.prepare(net, own)
    calls = []

    def loss_fn(*arguments: Any) -> Any:
        calls.append(arguments)
        return zoo.cross_entropy(*arguments)

    step = strategy.train_step(model, optimizer, loss_fn)
    states = [flat_state(strategy, model)]
    for number in range(2):
        step(*own_batch(strategy, number))
    traced, buffers = len(calls), strategy._backend._prepared[model].gradients.buffers
    seen = any(buffer.numpy().any() for buffer in buffers)
    strategy.save(folder, model=model, optimizer=optimizer)
    for _ in range(2):
        for number in range(4):
            used, unused = optimizer.param_groups
            used["lr"] = (1, 0.1, np.float32(0.2), np.float64(0.3))[number]
            unused["weight_decay"] = 0.01 if number < 2 else 0.1
            if kind == "amsgrad, later":
                used["amsgrad"] = unused["amsgrad"] = number > 1
            step(*own_batch(strategy, number))
        states.append(flat_state(strategy, model))
        strategy.load(folder, model=model, optimizer=optimizer)
    return Optimized(*states, traced, seen)


def odd_batches(strategy: unidist.Strategy) -> dict[str, list[float]]:
    """The parameters after training on batches that a global tensor cannot be made of at once."""
    import oneflow as flow

    from unidist_oneflow import zoo

    class Pair(NamedTuple):
        x: Any
        y: Any

    results = {}
    loss = zoo.cross_entropy
    x, y = own_batch(strategy, 0)
    rows = 3 + strategy.rank
    for name, batch, loss_fn in (
        ("a tensor without axes", (x, y, flow.tensor(0.5 + strategy.rank)), lambda m, x, y, k: k * loss(m, x, y)),
        ("rows that differ", (x[:rows], y[:rows]), loss),
        ("a named tuple", (Pair(x, y),), lambda m, pair: loss(m, pair.x, pair.y)),
    ):
        with contextlib.redirect_stderr(io.StringIO()):  # runs eagerly
            model, optimizer = strategy.prepare(mlp(strategy), unidist.SGD(0.3))
            step = strategy.train_step(model, optimizer, loss_fn)
            step(*batch)
            step(*batch)
        results[name] = flat_state(strategy, model)
    return results


def interrupted() -> bool:
    """Whether Ctrl-C is a KeyboardInterrupt, as in any Python program."""
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    except KeyboardInterrupt:
        return True
    return False


def own_batch(strategy: unidist.Strategy, number: int) -> list[Any]:
    """Four samples of this rank's own."""
    begin = 4 * (number * strategy.world_size + strategy.rank)
    return [strategy._backend.from_numpy(each[begin : begin + 4]) for each in reference.data(32)]


def flat_state(strategy: unidist.Strategy, model: Any) -> list[float]:
    backend = strategy._backend
    return np.concatenate([backend.to_numpy(each).ravel() for each in backend.state(model).values()]).tolist()


def data_loaders_taken_over(strategy: unidist.Strategy) -> list[Any]:
    """What strategy.loader makes of DataLoaders with various samplers: the samples seen by all, or the error."""
    import oneflow as flow
    from oneflow.utils.data import DataLoader, DistributedSampler, SubsetRandomSampler, TensorDataset

    data = TensorDataset(flow.arange(10))
    own = DistributedSampler(data, shuffle=True, seed=4)
    wrong = DistributedSampler(data, num_replicas=2, rank=1 - strategy.rank)
    results: list[Any] = []
    for sampler in (own, wrong, SubsetRandomSampler(range(5))):
        try:
            loader = strategy.loader(DataLoader(data, batch_size=2, sampler=sampler, num_workers=1))
            results.append(strategy.gather([x for (x,) in loader]).tolist())
        except unidist.UnidistError as error:
            results.append(str(error))
    return results


def refusal(action: Any) -> str:
    try:
        action()
    except unidist.errors.UnidistError as error:
        return str(error)
    return "not refused"

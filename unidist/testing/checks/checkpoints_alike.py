"""Promise 8, of calls that are wrong: all ranks are told so, by one type of error, and none is left waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from unidist.errors import CheckpointError, StateError, UsageError
from unidist.optim import SGD
from unidist.testing import reference
from unidist.testing.case import Case, check, close, refused
from unidist.testing.checks.checkpoints import Run, settled


class Unreadable(Mapping[str, int]):
    """Looking into it fails."""

    def __getitem__(self, key: str) -> int:
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return iter(["a"])

    def __len__(self) -> int:
        return 1


@check
def ranks_that_ask_for_different_parts_are_told(case: Case) -> None:
    """As `model=m if strategy.is_main else None` does: each rank reads who asks for what, and nothing has changed."""
    case.needs_ranks(2)
    run = Run(case, SGD(0.1, momentum=0.9)).train(1)
    whole = case.strategy.capabilities.optimizer_state is True
    parts = run.parts if whole else {"model": run.model, "loader": run.loader}
    case.strategy.save(case.folder / "asked", **parts)
    run.train(1)
    before, main = settled(case, run.model), case.rank == 0
    save, load, place = case.strategy.save, case.strategy.load, case.folder / "asked"
    other = case.strategy.prepare(case.mlp(), SGD(0.1))[0]
    calls: list[Callable[[], Any]] = [
        lambda: load(place, model=run.model if main else None),
        lambda: load(place, model=run.model if main else other),
        lambda: load(place, model=run.model, loader=run.loader if main else None),
        lambda: load(place, model=run.model, generators=main),
        lambda: save(place, model=run.model if main else None),
        lambda: save(place, model=run.model if main else other),
        lambda: save(place, model=run.model, loader=None if main else run.loader),
    ]
    if whole:
        both = {"model": run.model, "optimizer": run.optimizer}
        calls += [
            lambda: load(place, model=run.model, optimizer=run.optimizer if main else None, generators=True),
            lambda: save(place, model=run.model, optimizer=None if main else run.optimizer),
            lambda: save(place, **both, keep=2 if main else None),
        ]
    for call in calls:
        with refused(UsageError, "do not ask for the same", "on rank 0 (host ", "on rank 1"):
            call()
        close(settled(case, run.model), before, tolerance=0)
    save(place if main else case.folder / "elsewhere", **parts)  # a path that has the time in it may differ
    assert not (case.folder / "elsewhere").exists()
    load(place, **parts)  # the ranks are still together


@check
def what_one_rank_alone_gets_wrong_reaches_all(case: Case) -> None:
    """Also what is seen at once, without the others: a rank that catches its error goes on, and so do they."""
    model, loader = case.strategy.prepare(case.mlp()), case.strategy.loader(reference.data(24), per_device_batch=2)
    last = case.rank == case.size - 1
    place = case.folder / "one-alone"
    case.strategy.save(place, model=model)
    save, load = case.strategy.save, case.strategy.load
    calls: dict[str, Callable[[], Any]] = {
        "keep=": lambda: save(place, model=model, keep=0 if last else None),
        "strategy.loader()": lambda: save(place, model=model, loader=5 if last else loader),
        "called 'unidist'": lambda: save(place, model=model, **({"unidist": 1} if last else {})),
        "optimizer= needs": lambda: load(place, model=None if last else model, optimizer=object() if last else None),
    }
    for words, call in calls.items():
        with refused(UsageError, words, *((f"on rank {case.size - 1} (host ",) if case.size > 1 else ())):
            call()
        assert case.strategy.all_reduce(1, "sum") == case.size
    path: Any = None if last else place
    for act in (save, load):
        with refused(UsageError, "the path is None"):
            act(path, model=model)


@check
def calls_that_cannot_be_are_one_clear_error(case: Case) -> None:
    """Never what Python or a framework happens to raise, and the same type on every rank."""
    model = case.strategy.prepare(case.mlp())
    place = case.folder / "cannot-be"
    case.strategy.save(place, model=model)
    paths: tuple[Any, ...] = ("a\0b", bytes(place), None, 7)
    for path in paths:
        with refused(UsageError, "the path is"):
            case.strategy.save(path, model=model)
        with refused(UsageError, "the path is"):
            case.strategy.load(path, model=model)
    with refused(UsageError, "digits"):
        case.strategy.save(place, model=model, number=10**5000)
    with refused(CheckpointError, "KeyError: 'a'"):
        case.strategy.save(place, model=model, values=Unreadable())
    with refused(UsageError, "int"):
        case.strategy.save(place, model=5)
    with refused(UsageError, "int"):
        case.strategy.load(place, model=5)
    assert case.strategy.load(place, model=model) == {}


@check
def loading_inside_a_group_is_refused(case: Case) -> None:
    """The gradients of the old weights would be applied to those that were loaded: by `optimizer=` or without."""
    case.requires("accumulate")
    model, optimizer = case.strategy.prepare(case.mlp(), SGD(0.1), accumulate=2)
    step = case.strategy.train_step(model, optimizer, case.zoo.cross_entropy)
    case.strategy.save(case.folder / "inside", model=model)
    loader = case.strategy.loader(reference.data(8 * case.backend.devices * case.size), per_device_batch=4)
    for number, (x, y) in enumerate(loader):
        step(x, y)
        if number == 0:
            with refused(StateError, "accumulation"):
                case.strategy.load(case.folder / "inside", model=model)
            case.strategy.save(case.folder / "weights-inside", model=model)  # which loses nothing
    case.strategy.load(case.folder / "inside", model=model)
    close(case.parameters(model), reference.weights(), tolerance=0)


@check
def loading_inside_a_step_is_refused(case: Case) -> None:
    case.requires("spelled_out")
    model, optimizer = case.strategy.prepare(case.mlp(), SGD(0.1))
    case.strategy.save(case.folder / "inside-a-step", model=model)
    loader = case.strategy.loader(reference.data(4 * case.backend.devices * case.size), per_device_batch=4)
    for x, y in loader:
        with case.strategy.forward(model):
            loss = case.zoo.cross_entropy(model, x, y)
        case.strategy.backward(loss)
        with refused(StateError, "step(optimizer)"):
            case.strategy.load(case.folder / "inside-a-step", model=model)
        assert case.strategy.step(optimizer)
    assert case.strategy.load(case.folder / "inside-a-step", model=model) == {}

"""Who is there, what is said, and what is refused."""

from __future__ import annotations

import contextlib
import io
import logging
import time
from dataclasses import fields

from unidist import __version__, registry
from unidist.errors import PeerFailed, StateError, UnknownOption, UsageError
from unidist.optim import SGD
from unidist.strategy import Strategy
from unidist.testing import reference
from unidist.testing.case import Case, check, refused


@check
def every_rank_is_there_once(case: Case) -> None:
    strategy = case.strategy
    assert strategy.all_gather(strategy.rank) == list(range(strategy.world_size))
    assert strategy.is_main == (strategy.rank == 0)
    assert 0 <= strategy.local_rank < strategy.world.local_world_size


@check
def start_line_says_what_was_chosen(case: Case) -> None:
    """One line, on rank 0 alone: backend, environment and why, device, transport."""
    # On a busy machine some ranks also say that they wait for others: that is not this line.
    lines = [line for line in case.said_at_start.splitlines() if line.startswith(f"unidist {__version__}: ")]
    assert len(lines) == (case.rank == 0), case.said_at_start
    world = case.strategy.world
    for word in (case.strategy.backend, world.source, world.reason, case.strategy.device, case.backend.transport):
        assert all(word in line for line in lines), f"{word!r} is not in {lines}"


@check
def print_is_for_rank_0(case: Case) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as heard:
        case.strategy.print("hello", 3)
    assert heard.getvalue() == ("hello 3\n" if case.rank == 0 else "")


@check
def log_names_the_rank(case: Case) -> None:
    with contextlib.redirect_stderr(io.StringIO()) as heard:
        case.strategy.log("here", 3)
    assert heard.getvalue() == f"[rank {case.rank}] here 3\n"


@check
def misspelt_option_is_answered_with_the_right_one(case: Case) -> None:
    plugin = registry.plugin(case.strategy.backend)
    name = fields(plugin.options)[0].name
    with refused(UnknownOption, repr(name)):
        registry.build_options(plugin, {name[:-1] + "x": 1})


@check
def gpu_that_is_not_there_is_an_error(case: Case) -> None:
    """Never a silent fallback. (Where there is a GPU, a far too high index stands in for none.)"""
    start = registry.backend_class(registry.plugin(case.strategy.backend))
    with refused(Exception, "GPU"):
        start(case.strategy.world, case.backend.options, "cuda:4096", 5.0)


@check
def second_strategy_is_refused(case: Case) -> None:
    with refused(StateError, "open already in this process"):
        Strategy(case.strategy.backend)


@check
def main_first_lets_rank_0_go_first(case: Case) -> None:
    made = case.folder / "made-by-main"
    with case.strategy.main_first():
        if case.rank == 0:
            time.sleep(0.2)  # the others would overtake now if they could
            made.write_text("ready")
        assert made.read_text() == "ready"


@check
def main_first_local_lets_each_node_go_first(case: Case) -> None:
    made = case.folder / f"made-on-node-{case.strategy.node_rank}"
    with case.strategy.main_first(local=True):
        if case.strategy.local_rank == 0:
            time.sleep(0.2)
            made.write_text("ready")
        assert made.read_text() == "ready"


@check
def main_first_releases_the_others_when_it_fails(case: Case) -> None:
    ran = False
    with refused(KeyError if case.rank == 0 else PeerFailed), case.strategy.main_first():
        ran = True
        raise KeyError("download failed")
    assert ran == (case.rank == 0)
    assert case.strategy.all_reduce(1, "sum") == case.size  # and the job can go on


@check
def bad_arguments_are_refused_before_anything_happens(case: Case) -> None:
    strategy = case.strategy
    for arguments in ({}, {"per_device_batch": 4, "global_batch": 4}, {"per_device_batch": 0}, {"global_batch": 2.5}):
        with refused(UsageError, "batch"):
            strategy.loader(reference.data(8), **arguments)
    with refused(UsageError, "accumulate"):
        strategy.prepare(case.mlp(), SGD(0.1), accumulate=0)
    with refused(UsageError, "median"):
        strategy.all_reduce(1, "median")
    with refused(UsageError, "source"):
        strategy.broadcast(1, case.size)
    with refused(UsageError, "prepare"):
        strategy.train_step(case.mlp(), None, case.zoo.cross_entropy)


@check
def progress_and_metrics_are_for_rank_0(case: Case) -> None:
    loader = case.strategy.loader(reference.data(16), per_device_batch=4)
    with contextlib.redirect_stderr(io.StringIO()) as heard:
        bar = case.strategy.progress(loader, "pass")
        for number, _ in enumerate(bar.over(loader)):
            bar.show(loss=float(number))
    assert ("samples/s" in heard.getvalue()) == (case.rank == 0), heard.getvalue()
    with case.strategy.metrics(case.folder / "metrics", ("csv", "jsonl")) as metrics:
        metrics.write(1, loss=0.5)
    case.strategy.barrier()
    assert (case.folder / "metrics" / "metrics.csv").read_text().count("\n") == 2


@check
def every_rank_has_a_log_file(case: Case) -> None:
    root = logging.getLogger()
    before = list(root.handlers)
    case.strategy.log_to(case.folder / "logs")
    try:
        logging.getLogger("mine").warning("from rank %d", case.rank)
    finally:
        for handler in [handler for handler in root.handlers if handler not in before]:
            root.removeHandler(handler)
            handler.close()
    case.strategy.barrier()
    (run,) = (case.folder / "logs").iterdir()
    assert f"from rank {case.rank}" in (run / f"rank-{case.rank}.log").read_text()

"""`Strategy`: what users hold. It starts and ends here; what it can do in between is in `interface`, by subject."""

from __future__ import annotations

import json
import os
import weakref
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from unidist import registry
from unidist._version import __version__
from unidist.alike import facts
from unidist.checks import check_seconds
from unidist.control import ending
from unidist.control.watch import Watch
from unidist.data.results import Results
from unidist.errors import StateError, UnidistError, UsageError
from unidist.interface.checkpoints import Checkpoints
from unidist.interface.collectives import CollectiveCalls
from unidist.interface.data import Data
from unidist.interface.output import Output
from unidist.interface.training import Training
from unidist.training.spelled_out import SpelledOut
from unidist.training.trainer import Trainer
from unidist.world import detect

if TYPE_CHECKING:
    from collections.abc import Callable

    from unidist.backend import Backend, Plugin


class Strategy(Training, Data, Checkpoints, CollectiveCalls, Output):
    """One process's view of a distributed job. Use it as `with unidist.Strategy("torch") as strategy:`.

    backend      "torch", ...; not given: UNIDIST_BACKEND, the launcher's variables, or what is installed
    init         "tcp://host:port" or "file:///path" with `rank` and `world_size`, for processes started by hand;
                 what is not given, or is -1 as in torch's scripts, is found in the environment (see `unidist.world`)
    device       "cpu", "cuda", "cuda:1"; not given: a GPU for each process if there are any
    timeout      seconds to wait for the other ranks at the start, a week at most
    options      the backend's own; an unknown one is refused, with the nearest right name

    Leaving `with` after an exception never waits for the other ranks.
    """

    def __init__(
        self,
        backend: str | None = None,
        *,
        init: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        device: str | None = None,
        timeout: float = 300.0,
        **options: Any,
    ) -> None:
        _refuse_a_second()
        timeout = check_seconds("timeout", timeout)
        plugin, why = registry.choose(backend)
        settings = registry.build_options(plugin, _with_launch_options(plugin, options))
        found = detect(init=init, rank=rank, world_size=world_size)
        if found.role != "worker":
            registry.serve(plugin, found, settings, timeout)
        if plugin.place is not None:
            found = plugin.place(found, settings)
        company = plugin.company(found, settings) if plugin.company is not None else None
        several = found.world_size > 1 or company is not None
        same = facts(plugin, settings) if several else {}
        self._watch = Watch(found, same, timeout, company)
        try:
            connect = self._import_while_meeting(plugin)
            self._backend = connect(self._watch.meet(), settings, device, timeout)
            self._watch.attach(self._backend)
        except BaseException as error:
            self._watch.failed(error)
            self._watch.close(failed=True)
            raise
        global _latest
        _latest = (os.getpid(), weakref.ref(self))
        self._closed, self._process = False, os.getpid()
        self._name = plugin.name
        self._bar, self._log_handlers = None, []
        self._results = Results(self._backend, lambda: self._collectives)
        self._trainer = Trainer(self._backend, self._watch, self._require, self._results.on_step)
        self._spelled_out = SpelledOut(self._trainer)
        if self.is_main:
            world, nodes = self.world, self.world.num_nodes
            self._say(
                f"unidist {__version__}: {self._name} {self._backend.version} ({why}), {world.world_size} "
                f"process{'es' * (world.world_size > 1)} on {nodes or '?'} node{'s' * (nodes != 1)} from "
                f"{world.source} ({world.reason}), device {self.device}, transport {self._backend.transport}"
            )

    def _import_while_meeting(self, plugin: Plugin) -> Callable[..., Backend]:
        """The other ranks are on their way meanwhile. Where the import fails, this one still has to meet them, so that
        they can be told why."""
        try:
            return registry.backend_class(plugin)
        except Exception:
            with suppress(UnidistError):
                self._watch.meet()
            raise

    def __enter__(self) -> Strategy:
        self._require_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(error)

    def close(self) -> None:
        """Meet the other ranks a last time and leave. `with` does it."""
        self._leave(None)

    def _leave(self, error: BaseException | None) -> None:
        if self._closed:
            return
        if os.getpid() != self._process:  # a forked child: the job, its engine and the log files are its parent's
            ending.note_the_end()
            return
        failed = error is not None
        self._closed = self._trainer.closed = True
        self._close_logs()
        try:
            if error is not None:
                self._watch.failed(error)
                self._backend.close(failed=True)
            else:
                with self._watch.leaving():  # in debug mode a rank that is still training is told so
                    peers, notice = self.world.peers, ""
                    if peers is not None:
                        from unidist.training.drift import compare_at_the_end

                        notice = compare_at_the_end(self._trainer.comparable, peers, self._watch.made)
                    if notice and self.is_main:
                        self._say(f"unidist: {notice}")
                    self._backend.close(failed=False)
        except BaseException as raised:
            failed = True
            self._watch.failed(raised)
            raise
        finally:
            self._watch.close(failed)


def _with_launch_options(plugin: Plugin, given: dict[str, Any]) -> dict[str, Any]:
    """`unidist run --option key=value` arrives in UNIDIST_OPTIONS; a contradiction with the call is refused."""
    if os.environ.get("UNIDIST_BACKEND") != plugin.name or not os.environ.get("UNIDIST_OPTIONS"):
        return given
    launched: dict[str, Any] = json.loads(os.environ["UNIDIST_OPTIONS"])
    for key in [key for key in given if key in launched and launched[key] != given[key]]:
        # As the backend understands them: one value may have two spellings.
        here, there = (registry.build_options(plugin, {**launched, key: options[key]}) for options in (given, launched))
        if here != there:
            raise UsageError(
                f"option {key} is {given[key]!r} in Strategy(…) and {launched[key]!r} in `unidist run --option`: "
                "keep one"
            )
    return launched | given


_latest: tuple[int, weakref.ref[Strategy]] | None = None  # the process that made a Strategy last, and which


def _refuse_a_second() -> None:
    """The other ranks would wait for this one at a meeting that it cannot come to, or an engine start twice."""
    if _latest is None or _latest[0] != os.getpid():  # a forked process has none of its own
        return
    import gc

    for _ in range(2):
        strategy = _latest[1]()
        if strategy is None or strategy._closed:
            return
        del strategy
        gc.collect()  # nobody may hold it any more
    raise StateError(
        "a Strategy is open already in this process: close it first, by strategy.close() or by leaving its `with` block"
    )

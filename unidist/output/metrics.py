"""Numbers of a run, step by step, in files that other tools read: metrics.csv, metrics.jsonl, TensorBoard events."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from unidist.checks import check_whole, did_you_mean
from unidist.errors import UsageError
from unidist.output.numbers import number
from unidist.output.tables import Csv, JsonLines
from unidist.output.tensorboard import TensorBoard

Row = dict[str, int | float]


class Sink(Protocol):
    def __init__(self, folder: Path) -> None: ...

    def drop_from(self, step: int) -> None:
        """Forget the rows of `step` and later: they are of a part that is run again."""

    def write(self, step: int, seconds: float, values: Row) -> None:
        """Append, and hand to the system: a kill after this loses nothing."""

    def close(self) -> None: ...


SINKS: dict[str, type[Sink]] = {"csv": Csv, "jsonl": JsonLines, "tensorboard": TensorBoard}


class Metrics:
    """`with Metrics("out") as metrics: metrics.write(step, loss=loss)`. Values are numbers or tensors of one element.

    Steps never go back within a run; a step may be written several times (the loss, later the accuracy).

    Resuming: an existing file is continued. Rows of the first step that is written now, and later ones, are of a part
    that is run again after a crash, and are replaced; `resume=120` says it exactly: rows after step 120 go. Where that
    leaves nothing, as for a new run in an old folder, the old file is kept as metrics.1.csv.

    A new name in the middle of a run adds a column: the CSV is rewritten once, and the rows before have it empty.
    With `active=False`, on all ranks but the first, nothing is opened and written.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        formats: Sequence[str] = ("csv",),
        *,
        resume: int | None = None,
        active: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        formats = (formats,) if isinstance(formats, str) else tuple(formats)
        for name in formats:
            if name not in SINKS:
                raise UsageError(
                    f"metrics have no format {name!r}.{did_you_mean(name, SINKS)} There are {', '.join(SINKS)}."
                )
        if resume is not None:
            check_whole("resume", resume, 0)
        self._clock, self._active = clock, active
        self._last: int | None = resume
        self._fresh = resume is None  # what lies after the first row is still to be dropped
        self._sinks: list[Sink] = []
        if active:
            try:
                Path(folder).mkdir(parents=True, exist_ok=True)
                self._sinks = [SINKS[name](Path(folder)) for name in dict.fromkeys(formats)]
                if resume is not None:
                    for sink in self._sinks:
                        sink.drop_from(resume + 1)
            except OSError as error:
                raise UsageError(f"cannot write metrics to {folder}: {error.strerror or error}") from error

    def write(self, step: int, values: Mapping[str, Any] | None = None, /, **named: Any) -> None:
        """One row. A mapping is for names such as "train/loss" that are no Python names."""
        if not self._active:
            return
        check_whole("step", step, 0)
        if self._last is not None and step < self._last:
            raise UsageError(f"metrics of step {step} after those of step {self._last}: steps do not go back in a run")
        row = {name: number(name, value) for name, value in {**(values or {}), **named}.items()}
        for name in row:
            if not isinstance(name, str) or name in ("step", "time", "") or not name.isprintable():
                raise UsageError(f"a metric cannot be called {name!r}")
        seconds = self._clock()
        for sink in self._sinks:
            if self._fresh:
                sink.drop_from(step)
            sink.write(step, seconds, row)
        self._fresh, self._last = False, step

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()
        self._sinks, self._active = [], False

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

"""A log file for each rank, in a folder that belongs to one run."""

from __future__ import annotations

import logging
import os
import re
import time
from pathlib import Path

from unidist.checks import check_whole
from unidist.errors import UsageError


def stamp(seconds: float) -> str:
    """The name of a run, from the time at which it began: take rank 0's on every rank. UTC, as hosts may differ."""
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime(seconds))


def rank_log(folder: str | os.PathLike[str], rank: int, run: str | None = None) -> logging.FileHandler:
    """A handler that appends to `folder/run/rank-3.log`, for `logging.getLogger().addHandler(…)`.

    Whoever comes first makes the folder, whoever comes later finds it; no rank waits. Every record is flushed. `run`
    must be the same on all ranks: clocks read on each of them would give folders a second apart.
    """
    check_whole("rank", rank, 0)
    if run is not None and not re.fullmatch(r"[\w][\w.-]*", run):
        raise UsageError(f"run is {run!r}, it must be usable as the name of a folder")
    place = Path(folder) / run if run else Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(place / f"rank-{rank}.log", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"rank {rank} cannot log to {place}: {error.strerror}") from error
    form = logging.Formatter(
        f"%(asctime)s.%(msecs)03dZ rank {rank} %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"
    )
    form.converter = time.gmtime
    handler.setFormatter(form)
    return handler

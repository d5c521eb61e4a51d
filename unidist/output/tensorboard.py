"""Metrics as TensorBoard events, by the `tensorboard` package's own records; no framework is imported for it."""

from __future__ import annotations

import importlib
import os
import socket
import time
from pathlib import Path
from typing import Any

from unidist.errors import UsageError

Row = dict[str, int | float]


class TensorBoard:
    """One events file for each process that ever wrote to the folder. TensorBoard itself drops what was run again.

    Not its EventFileWriter: that imports TensorFlow where it is installed, and writes from a thread, late.
    """

    def __init__(self, folder: Path) -> None:
        try:
            event: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
            summary: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
            record: Any = importlib.import_module("tensorboard.summary.writer.record_writer")
        except ImportError as error:
            from unidist.setup.store import how_to_add

            raise UsageError(
                f"metrics in the format 'tensorboard' need a package that is not there ({error}). Add it with "
                f"`{how_to_add('tensorboard')}`, or leave the format out."
            ) from error
        self._event, self._session, self._summary = event.Event, event.SessionLog, summary.Summary
        # The time comes first in the name, so that readers take the files in order.
        base = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        number = 0
        while (file := folder / f"{base}.{number}").exists():
            number += 1
        self._file = open(file, "xb", buffering=0)  # noqa: SIM115
        self._records = record.RecordWriter(self._file)
        self._write(file_version="brain.Event:2")

    def drop_from(self, step: int) -> None:
        """A session that starts at a step tells readers to forget that step and later ones of the files before."""
        self._write(step=step, session_log=self._session(status=self._session.START))

    def write(self, step: int, seconds: float, values: Row) -> None:
        summary = self._summary(value=[self._summary.Value(tag=tag, simple_value=x) for tag, x in values.items()])
        self._write(seconds, step=step, summary=summary)

    def _write(self, seconds: float | None = None, **fields: Any) -> None:
        event = self._event(wall_time=time.time() if seconds is None else seconds, **fields)
        self._records.write(event.SerializeToString())

    def close(self) -> None:
        self._file.close()

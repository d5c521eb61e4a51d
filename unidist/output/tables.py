"""Metrics as lines of text: CSV and JSON lines. Rows are appended; a rewrite is a new file renamed over the old."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from unidist.errors import UsageError

Row = dict[str, int | float]


class Table:
    """A text file of whole lines. The last one may be half written, by a process that was killed: it goes."""

    name: str

    def __init__(self, folder: Path) -> None:
        self._path = folder / self.name
        if self._path.exists():
            _cut_half_line(self._path)
        self._file: TextIO | None = None

    def _append(self, text: str) -> None:
        if self._file is None:
            self._file = open(self._path, "a", encoding="utf-8", newline="")  # noqa: SIM115
        self._file.write(text)
        self._file.flush()

    def _lines(self) -> list[str]:
        with open(self._path, encoding="utf-8", newline="") as file:
            return file.readlines()

    def _replace(self, text: str) -> None:
        self.close()
        draft = self._path.with_name(f".{self.name}.new")
        with open(draft, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, self._path)

    def _put_aside(self) -> None:
        """metrics.csv -> metrics.1.csv, or the next number that is free."""
        self.close()
        number = 1
        while (aside := self._path.with_suffix(f".{number}{self._path.suffix}")).exists():
            number += 1
        self._path.rename(aside)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class JsonLines(Table):
    """{"step": 10, "time": 1763268000.0, "loss": 0.5}; where JSON has no number: "NaN", "Infinity", "-Infinity"."""

    name = "metrics.jsonl"

    def drop_from(self, step: int) -> None:
        if not self._path.exists():
            return
        lines = self._lines()
        kept = [line for line in lines if self._step(line) < step]
        if not kept and lines:
            self._put_aside()
        elif len(kept) < len(lines):
            self._replace("".join(kept))

    def _step(self, line: str) -> int:
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            raise UsageError(f"{self._path} holds other lines than metrics of unidist: move it away") from None

    def write(self, step: int, seconds: float, values: Row) -> None:
        row: dict[str, Any] = {"step": step, "time": seconds}
        row |= {name: value if math.isfinite(value) else _WORDS[str(value)] for name, value in values.items()}
        self._append(json.dumps(row, allow_nan=False) + "\n")


_WORDS = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


class Csv(Table):
    """step,time,loss,…: columns in the order of their first appearance; empty where a row has no value."""

    name = "metrics.csv"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._columns = ["step", "time"]
        if self._path.exists() and (rows := self._rows()):
            self._columns = rows[0]
            if self._columns[:2] != ["step", "time"]:
                raise UsageError(f"{self._path} is not a table of unidist's metrics: move it away")

    def drop_from(self, step: int) -> None:
        if not self._path.exists():
            return
        rows = self._rows()[1:]
        try:
            kept = [row for row in rows if int(row[0]) < step]
        except (ValueError, IndexError):
            raise UsageError(f"{self._path} holds a row without a step: repair it or move it away") from None
        if not kept and rows:
            self._put_aside()
            self._columns = ["step", "time"]
        elif len(kept) < len(rows):
            self._replace(_text([self._columns, *kept]))

    def write(self, step: int, seconds: float, values: Row) -> None:
        new = [name for name in values if name not in self._columns]
        begun = self._path.exists() and self._path.stat().st_size > 0
        if new:
            self._columns = self._columns + new
            if begun:
                self._replace(_text([self._columns, *(row + [""] * len(new) for row in self._rows()[1:])]))
        row: list[Any] = [step, seconds, *(values.get(name, "") for name in self._columns[2:])]
        self._append(_text([row] if begun else [self._columns, row]))

    def _rows(self) -> list[list[str]]:
        return list(csv.reader(self._lines()))


def _text(rows: Iterable[Iterable[Any]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def _cut_half_line(path: Path) -> None:
    with open(path, "rb+") as file:
        end = file.seek(0, os.SEEK_END)
        keep = end
        while keep > 0:
            begin = max(0, keep - 4096)
            file.seek(begin)
            found = file.read(keep - begin).rfind(b"\n")
            if found >= 0:
                keep = begin + found + 1
                break
            keep = begin
        if keep < end:
            file.truncate(keep)

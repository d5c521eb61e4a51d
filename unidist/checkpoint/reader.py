"""Reading: everything is checked before anything is returned."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unidist.checkpoint import arrays as array_files
from unidist.checkpoint.arrays import Array
from unidist.checkpoint.layout import INDEX, OURS, numbered, read_index
from unidist.checkpoint.values import decode
from unidist.errors import CheckpointError


@dataclass(frozen=True)
class Checkpoint:
    """What was read: arrays named "section/name", the values, and in which directory or file they were."""

    path: Path
    arrays: dict[str, Array]
    values: dict[str, Any]

    def section(self, name: str) -> dict[str, Array]:
        """The arrays of one section, by their names within it."""
        return {key[len(name) + 1 :]: array for key, array in self.arrays.items() if key.startswith(f"{name}/")}


def read(path: str | os.PathLike[str], *, only: Collection[str] | None = None) -> Checkpoint:
    """Read and check everything, or the arrays of the sections in `only`; what is not whole raises CheckpointError.

    `path` is a checkpoint, a folder of numbered ones (the newest is read), or a plain .safetensors file, whose arrays
    become the section "model".
    """
    place = Path(path)
    try:
        if place.is_file():
            return _read_plain(place)
        missing, seen = "", None
        while True:
            directory = place if (place / INDEX).exists() else latest(place)
            if directory is None:
                raise CheckpointError(_nothing_at(place))
            try:
                index = read_index(directory)
                if index == seen:
                    raise CheckpointError(f"{directory} is not whole: {missing} is missing")
                seen = index
                return _read_indexed(directory, index, only)
            except FileNotFoundError as error:
                # Another process may have saved meanwhile: then there is a new index, which names new files.
                missing = Path(error.filename).name
    except OSError as error:
        raise CheckpointError(f"cannot read {error.filename or place}: {error.strerror or error}") from error


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The checkpoint in `folder` that was written last; None when there is none yet.

    Last written, not highest number: after going back to an older one, the run that was left is not resumed. One that
    was damaged since is passed over with a warning. `folder` may be a checkpoint itself.
    """
    place = Path(folder)
    if (place / INDEX).exists():
        return place
    newest: tuple[int, Path] | None = None
    for directory in numbered(place):
        try:
            index = read_index(directory)
            for entry in index["files"].values():
                if (directory / entry["file"]).stat().st_size != entry["bytes"]:
                    raise CheckpointError(f"{directory / entry['file']} has not the size that was written")
        except FileNotFoundError:
            continue  # never finished, or just being removed
        except CheckpointError as error:
            warnings.warn(f"passed over: {error}", RuntimeWarning, stacklevel=2)
            continue
        if newest is None or newest[0] < index["serial"]:
            newest = index["serial"], directory
    return newest[1] if newest else None


def _read_indexed(directory: Path, index: dict[str, Any], only: Collection[str] | None) -> Checkpoint:
    files = index["files"]
    absent = [section for section in only or () if section not in files]
    if absent:
        raise CheckpointError(f"{directory} has no section {absent[0]!r}, it has {', '.join(files) or 'none'}")
    arrays = {
        f"{section}/{name}": array
        for section, entry in files.items()
        if only is None or section in only
        for name, array in array_files.load(directory / entry["file"], entry["bytes"], entry["sha256"]).items()
    }
    try:
        return Checkpoint(directory, arrays, decode(index["values"]))
    except ValueError as error:
        raise CheckpointError(f"{directory / INDEX} is damaged: {error}") from error


def _read_plain(file: Path) -> Checkpoint:
    if file.name == INDEX:
        raise CheckpointError(f"{file}: give the directory {file.parent}")
    return Checkpoint(file, {f"model/{name}": array for name, array in array_files.load(file).items()}, {})


def _nothing_at(place: Path) -> str:
    if not place.exists():
        return f"there is no checkpoint at {place}"
    held = sorted(each.name for each in place.iterdir())
    if any(OURS.fullmatch(name) for name in held):
        return f"{place} is not whole: its first save was interrupted, or {INDEX} was removed"
    return f"{place} is not a unidist checkpoint: it has no {INDEX}. It holds {', '.join(held[:5]) or 'nothing'}"

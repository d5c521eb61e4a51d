"""Reading: everything is checked before anything is returned."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unidist.checkpoint import arrays as array_files
from unidist.checkpoint import layout
from unidist.checkpoint.arrays import Array
from unidist.checkpoint.layout import INDEX, OURS, numbered, read_index
from unidist.errors import CheckpointError


@dataclass(frozen=True)
class Checkpoint:
    """What was read: arrays named "section/name", the values, and in which directory or file they were."""

    path: Path
    arrays: dict[str, Array]
    values: dict[str, Any]
    sha256: str = ""  # of the index, which holds that of every file; of the file itself where there is no index

    def section(self, name: str) -> dict[str, Array]:
        """The arrays of one section, by their names within it."""
        return {key[len(name) + 1 :]: array for key, array in self.arrays.items() if key.startswith(f"{name}/")}


def read(path: str | os.PathLike[str], *, only: Collection[str] | None = None, missing_ok: bool = False) -> Checkpoint:
    """Read and check everything, or the arrays of the sections in `only`; what is not whole raises CheckpointError.

    `path` is a checkpoint, a folder of numbered ones (the newest is read), or a plain .safetensors file, whose arrays
    become the section "model". While another process saves there, what is read is the old checkpoint or the new one.
    """
    place = layout.place(path)
    try:
        if place.is_file():
            return _read_plain(place)
        seen = None
        while True:
            found = _newest(place)
            if found is None:
                raise CheckpointError(_nothing_at(place))
            try:
                return _read_indexed(*found, only, missing_ok)
            except FileNotFoundError as error:
                # Another process may have saved meanwhile: then there is a new index, which names new files.
                if found[1]["sha256"] == seen:
                    raise CheckpointError(_not_whole(found[0], error)) from error
                seen = found[1]["sha256"]
    except OSError as error:
        raise CheckpointError(f"cannot read {error.filename or place}: {error.strerror or error}") from error


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The checkpoint in `folder` that was written last; None when there is none yet.

    Last written, not highest number: after going back to an older one, the run that was left is not resumed. One that
    was damaged since is passed over with a warning. `folder` may be a checkpoint itself.
    """
    place = layout.place(folder)
    if (place / INDEX).exists():  # damaged or not
        return place
    found = _newest(place)
    return found[0] if found else None


def _newest(place: Path) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint itself, or the last written of numbered ones, with its index."""
    try:
        return place, read_index(place)
    except (FileNotFoundError, NotADirectoryError):
        pass
    seen: set[Path] | None = None
    while True:
        listed = set(numbered(place))
        whole = [(index["serial"], directory, index) for directory in listed if (index := _whole_index(directory))]
        if whole:
            return max(whole, key=lambda entry: entry[:2])[1:]
        if listed == seen:
            return None
        seen = listed  # a writer that keeps only one may have replaced it since they were listed


def _whole_index(directory: Path) -> dict[str, Any] | None:
    """None when there is none, or its files are not those that were written; the latter with a warning."""
    seen = None
    try:
        while True:
            try:
                index = read_index(directory)
            except FileNotFoundError:
                return None  # never finished, or just being removed
            try:
                for entry in index["files"].values():
                    if (directory / entry["file"]).stat().st_size != entry["bytes"]:
                        raise CheckpointError(f"{directory / entry['file']} has not the size that was written")
                return index
            except FileNotFoundError as error:
                if index["sha256"] == seen:
                    raise CheckpointError(_not_whole(directory, error)) from error
                seen = index["sha256"]  # it may have been saved anew, or removed, meanwhile
    except CheckpointError as error:
        warnings.warn(f"passed over: {error}", RuntimeWarning, stacklevel=4)
        return None


def _read_indexed(directory: Path, index: dict[str, Any], only: Collection[str] | None, missing_ok: bool) -> Checkpoint:
    files = index["files"]
    absent = [section for section in only or () if section not in files]
    if absent and not missing_ok:
        raise CheckpointError(f"{directory} has no section {absent[0]!r}, it has {', '.join(files) or 'none'}")
    arrays = {
        f"{section}/{name}": array
        for section, entry in files.items()
        if only is None or section in only
        for name, array in array_files.load(directory / entry["file"], entry["bytes"], entry["sha256"])[0].items()
    }
    return Checkpoint(directory, arrays, index["values"], index["sha256"])


def _read_plain(file: Path) -> Checkpoint:
    if file.name == INDEX:
        raise CheckpointError(f"{file}: give the directory {file.parent}")
    arrays, sha256 = array_files.load(file)
    return Checkpoint(file, {f"model/{name}": array for name, array in arrays.items()}, {}, sha256)


def _not_whole(directory: Path, error: FileNotFoundError) -> str:
    return f"{directory} is not whole: {Path(error.filename).name} is missing"


def _nothing_at(place: Path) -> str:
    if not place.exists():
        return f"there is no checkpoint at {place}"
    held = sorted(path.name for path in place.iterdir())
    if any(OURS.fullmatch(name) for name in held):
        return f"{place} is not whole: its first save was interrupted, or {INDEX} was removed"
    return f"{place} is not a unidist checkpoint: it has no {INDEX}. It holds {', '.join(held[:5]) or 'nothing'}"

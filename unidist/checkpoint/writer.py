"""Writing, in the order that makes it atomic (see `layout`), and removing the old ones of a folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import operator
import os
import secrets
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from unidist._version import __version__
from unidist.checkpoint import arrays as array_files
from unidist.checkpoint.arrays import Array
from unidist.checkpoint.layout import (
    FORMAT,
    INDEX,
    OURS,
    SECTION,
    VERSION,
    NotOurs,
    digest,
    numbered,
    place,
    read_index,
)
from unidist.checkpoint.values import encode
from unidist.errors import CheckpointError, UsageError


def write(
    path: str | os.PathLike[str],
    arrays: Mapping[str, Array],
    values: Mapping[str, Any] | None = None,
    *,
    step: int | None = None,
    keep: int | None = None,
) -> Path:
    """Save to the directory `path`, or with `step` to its numbered sub-directory, and return where.

    `keep=n` removes all but the n last written numbered ones, once the new one is safe. A value or name that cannot be
    saved raises UsageError before the disk is touched; a save that fails raises CheckpointError and leaves the
    checkpoint that was there.
    """
    folder = place(path)
    if step is None and keep is not None:
        raise UsageError("keep= needs step=, the number under which this checkpoint is kept")
    number = None if step is None else _whole("step", step, 0)
    if keep is not None:
        keep = _whole("keep", keep, 1)
    sections = _sections(arrays)
    encoded = encode(dict(values or {}))
    directory = folder if number is None else folder / f"step-{number:06d}"
    try:
        _make(directory)
        if number is None:
            with _locked(directory):
                _save(directory, sections, encoded, serial=_serial(directory) + 1)
        else:
            with _locked(folder), _locked(directory):
                _save(directory, sections, encoded, serial=1 + max(map(_serial, numbered(folder)), default=0))
                _prune(folder, directory, keep)
    except OSError as error:
        raise CheckpointError(
            f"cannot save to {directory}: {error.strerror or error}. What was saved before is unchanged."
        ) from error
    return directory


def _sections(arrays: Mapping[str, Array]) -> dict[str, dict[str, Array]]:
    sections: dict[str, dict[str, Array]] = {}
    for name, array in arrays.items():
        section, slash, rest = name.partition("/")
        if not slash or not rest or not SECTION.fullmatch(section):
            raise UsageError(f'the array {name!r} needs a section in front, such as "model/{name.lstrip("/")}"')
        if rest == "__metadata__":
            raise UsageError(f"the array {name!r} has a name that safetensors keeps for itself")
        sections.setdefault(section, {})[rest] = array_files.check(name, array)
    return sections


def _save(directory: Path, sections: Mapping[str, Mapping[str, Array]], values: Any, serial: int) -> None:
    try:
        _sweep(directory, read_index(directory))  # first, since a killed writer's files may be what fills the disk
    except NotOurs:
        raise  # another program's is not overwritten
    except (FileNotFoundError, CheckpointError):
        pass  # none yet, or a damaged one: its files go when the new one is there
    token = secrets.token_hex(8)
    draft = directory / f".checkpoint-{token}.json"
    files: dict[str, Any] = {}
    try:
        for section, named in sections.items():
            file = directory / f"{section}-{token}.safetensors"
            files[section] = {"file": file.name}  # before it exists: a failed save removes it by this name
            size, sha256 = array_files.save(file, named)
            files[section] |= {"bytes": size, "sha256": sha256}
        body = {
            "format": FORMAT,
            "version": VERSION,
            "unidist": __version__,
            "serial": serial,
            "files": files,
            "values": values,
        }
        with open(draft, "x", encoding="ascii") as out:
            json.dump(body | {"sha256": digest(body)}, out, indent=1, allow_nan=False)
            out.write("\n")
            out.flush()
            os.fsync(out.fileno())
        _sync(directory)  # the array files' names must be on the disk before the index that names them
        os.replace(draft, directory / INDEX)
    except BaseException:
        for name in (draft.name, *(entry["file"] for entry in files.values())):
            with contextlib.suppress(OSError):
                os.unlink(directory / name)
        raise
    _sync(directory)
    _sweep(directory, body)


def _sweep(directory: Path, index: Mapping[str, Any] | None) -> None:
    """Remove our files that the index does not name: of the state before, and of killed writers."""
    named = {entry["file"] for entry in index["files"].values()} if index else set()
    for file in list(directory.iterdir()):
        if OURS.fullmatch(file.name) and file.name not in named:
            file.unlink(missing_ok=True)


def _prune(folder: Path, newest: Path, keep: int | None) -> None:
    whole: list[tuple[int, Path]] = []
    for directory in numbered(folder):
        if not (directory / INDEX).exists():
            _remove(directory)  # a killed writer's, or one whose removal was interrupted
        elif directory != newest and (index := _index_if_whole(directory)):
            whole.append((index["serial"], directory))
    if keep is not None:
        for _, directory in sorted(whole, reverse=True)[keep - 1 :]:
            _remove(directory)


def _remove(directory: Path) -> None:
    """The index goes first, so that what is left of it is never taken for a checkpoint."""
    try:
        (directory / INDEX).unlink(missing_ok=True)
        _sync(directory)
        _sweep(directory, None)
        directory.rmdir()
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:  # the user's own files stay
            warnings.warn(f"could not remove the old checkpoint {directory}: {error.strerror}", stacklevel=4)


def _serial(directory: Path) -> int:
    """Saves are numbered, since a clock may go back and a copy has new times. 0 before the first."""
    index = _index_if_whole(directory)
    return index["serial"] if index else 0


def _index_if_whole(directory: Path) -> dict[str, Any] | None:
    try:
        return read_index(directory)
    except (FileNotFoundError, CheckpointError):
        return None


def _make(directory: Path) -> None:
    """Like mkdir -p, with every new name synced."""
    missing = [directory, *directory.parents]
    missing = missing[: next(i for i, folder in enumerate(missing) if folder.exists())]
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        _sync(folder.parent)
    if not directory.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "there is a file of that name", str(directory))


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems cannot, and need not
            raise
    finally:
        os.close(handle)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Two writers would remove each other's files. The lock goes with its process, however that ends."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"another process is saving to {directory} just now: give each job, and one rank of it, its own path"
            ) from None
        except OSError:
            pass  # a file system without locks: one writer at a time is then the caller's care
        yield
    finally:
        os.close(handle)


def _whole(name: str, value: object, least: int) -> int:
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if number < least or isinstance(value, bool):
        raise UsageError(f"{name} is {value!r}, it must be a whole number from {least} up")
    return number

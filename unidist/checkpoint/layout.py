"""A checkpoint on disk: what is written when, so that a kill at any moment leaves the old one or the new one.

    out/final/checkpoint.json                     values, and the name, size and SHA-256 of each section's file
              model-5f0c….safetensors             one file for each section, under a name never used before
              optimizer-5f0c….safetensors

`checkpoint.json` alone decides what the checkpoint is. A save writes new array files beside the old ones, syncs
them, replaces `checkpoint.json` by an atomic rename, and only then removes the files that nothing names any more.
A directory that is not empty cannot be replaced by rename, and exchanging two (renameat2) exists on some Linux file
systems only, not on NFS, where checkpoints live; replacing one file is atomic on all of them.

Files of killed writers are removed by the next save; files that are not unidist's are never touched.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import reprlib
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from unidist._version import __version__
from unidist.checkpoint import expect
from unidist.checkpoint.values import decode
from unidist.errors import CheckpointError, UsageError

FORMAT = "unidist checkpoint"
VERSION = 1
INDEX = "checkpoint.json"

SECTION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
OURS = re.compile(r"[A-Za-z0-9_.-]+-[0-9a-f]{16}\.safetensors|\.checkpoint-[0-9a-f]{16}\.json")
NUMBERED = re.compile(r"step-\d{6,}")


class NotOurs(CheckpointError):
    """A checkpoint.json that some other program wrote."""


def place(path: object) -> Path:
    """Where a checkpoint is, as the user has said it."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str) or "\0" in text:
        raise UsageError(f"the path is {reprlib.repr(path)}: it must be a string, or a pathlib.Path, without NUL")
    if not text:  # pathlib takes it for the current directory; who means that can say so
        raise UsageError("the path is empty: name a folder, or write '.' for the current directory")
    return Path(text)


@contextlib.contextmanager
def open_file(file: Path) -> Iterator[BinaryIO]:
    """To be read without a buffer. Whatever else than a file has its name is refused: a pipe would be waited for."""
    with open(file, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise CheckpointError(f"{file} is damaged: it is no regular file")
        yield opened


def read_index(directory: Path) -> dict[str, Any]:
    """The parsed checkpoint.json, every part of it checked. Raises FileNotFoundError when there is none."""
    file = directory / INDEX
    with open_file(file) as opened:
        data = opened.read()
    try:
        body = json.loads(data, parse_constant=_refuse)
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise NotOurs(f"{file} was not written by unidist: this is another program's")
        if repr(body.get("version")) != repr(VERSION):  # True is not 1
            raise CheckpointError(
                f"{file} has format version {reprlib.repr(body.get('version'))}, this unidist ({__version__}) reads "
                f"{VERSION}: it was written by unidist {str(body.get('unidist'))[:40]}"
            )
        if body.get("sha256") != digest(body):
            raise CheckpointError(f"{file} is damaged, or was changed by hand: its SHA-256 differs")
        expect.whole("serial", body.get("serial"))
        for section, entry in expect.mapping("files", body.get("files")).items():
            if not SECTION.fullmatch(section):
                raise CheckpointError(f"{section[:80]!r} is no name of a section")
            said = expect.mapping(f"the file of {section}", entry)
            expect.whole(f"the size of {section}", said.get("bytes"))
            expect.text(f"the SHA-256 of {section}", said.get("sha256"))
            if not OURS.fullmatch(expect.text(f"the file of {section}", said.get("file"))):
                raise CheckpointError(f"{file} names files outside its directory")
        body["values"] = expect.mapping("values", decode(body.get("values")))
    except CheckpointError as error:
        if str(file) in str(error):
            raise
        raise CheckpointError(f"{file} is damaged: {error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is truncated or damaged: {error}") from error
    return body


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def digest(body: Mapping[str, Any]) -> str:
    """Of the parsed content but the digest itself, so that line ends and indentation do not matter."""
    content = {key: value for key, value in body.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, separators=(",", ":"), allow_nan=False).encode()).hexdigest()


def numbered(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if NUMBERED.fullmatch(path.name) and path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []

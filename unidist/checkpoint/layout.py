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

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unidist._version import __version__
from unidist.errors import CheckpointError

FORMAT = "unidist checkpoint"
VERSION = 1
INDEX = "checkpoint.json"

SECTION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
OURS = re.compile(r"[A-Za-z0-9_.-]+-[0-9a-f]{16}\.safetensors|\.checkpoint-[0-9a-f]{16}\.json")
NUMBERED = re.compile(r"step-\d{6,}")


class NotOurs(CheckpointError):
    """A checkpoint.json that some other program wrote."""


def read_index(directory: Path) -> dict[str, Any]:
    """The parsed and checked checkpoint.json. Raises FileNotFoundError when there is none."""
    file = directory / INDEX
    data = file.read_bytes()
    try:
        body = json.loads(data, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is truncated or damaged: {error}") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise NotOurs(f"{file} was not written by unidist: this is another program's")
    if body.get("version") != VERSION:
        raise CheckpointError(
            f"{file} has format version {body.get('version')!r}, this unidist ({__version__}) reads {VERSION}: it was "
            f"written by unidist {body.get('unidist')}"
        )
    if body.pop("sha256", None) != digest(body):
        raise CheckpointError(f"{file} is damaged, or was changed by hand: its SHA-256 differs")
    if not all(OURS.fullmatch(entry["file"]) for entry in body["files"].values()):
        raise CheckpointError(f"{file} names files outside its directory")
    return body


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def digest(body: Mapping[str, Any]) -> str:
    """Of the parsed content, so that line ends and indentation do not matter."""
    return hashlib.sha256(json.dumps(body, separators=(",", ":"), allow_nan=False).encode()).hexdigest()


def numbered(folder: Path) -> list[Path]:
    try:
        return [each for each in folder.iterdir() if NUMBERED.fullmatch(each.name) and each.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []

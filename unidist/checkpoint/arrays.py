"""Named arrays in one safetensors file.

Reading is the safetensors library's, which trusts nothing in the file. Writing is ours: the format is a header and
the bytes, and writing it in one pass gives the checksum and a sync without a second copy in memory, under a name and
with permissions that we choose (the library writes a .tmp file of mode 0600, which a killed writer leaves behind).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from unidist.errors import CheckpointError, UsageError

Array = np.ndarray[Any, Any]

_CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",  # ml_dtypes' own; numpy has none
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
}
_CHUNK = 16 << 20


def check(name: str, array: Any) -> Array:
    """`array` ready to be written: C order, little-endian, a dtype that the format has."""
    if not isinstance(array, (np.ndarray, np.generic)):
        raise UsageError(f"{name} is a {type(array).__name__}, it must be a numpy array")
    ready: Array = np.asarray(array, order="C")
    if ready.dtype.name not in _CODES:
        raise UsageError(f"{name} has dtype {ready.dtype}, a checkpoint takes {', '.join(sorted(_CODES))}")
    return ready.astype(ready.dtype.newbyteorder("<")) if ready.dtype.byteorder == ">" else ready


def save(file: Path, arrays: Mapping[str, Array]) -> tuple[int, str]:
    """Write a new file and sync it. Returns its size and SHA-256."""
    # Largest items first keeps every array aligned, as the library does.
    order = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    header: dict[str, Any] = {}
    end = 0
    for name in order:
        array = arrays[name]
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": _CODES[array.dtype.name], "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with open(file, "xb", buffering=0) as out:
        parts = [arrays[name].reshape(-1).view(np.uint8).data for name in order]
        for data in (memoryview(len(text).to_bytes(8, "little") + text), *parts):
            for begin in range(0, len(data), _CHUNK):
                chunk = data[begin : begin + _CHUNK]
                digest.update(chunk)
                while chunk:  # an unbuffered write may take less, most of all on a full disk
                    chunk = chunk[out.write(chunk) or 0 :]
        os.fsync(out.fileno())
    return 8 + len(text) + end, digest.hexdigest()


def load(file: Path, size: int | None = None, sha256: str | None = None) -> dict[str, Array]:
    """The arrays of a file; with `size` and `sha256`, only if it still is what was written.

    bfloat16, which numpy lacks, comes as float32: the same values.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    with open(file, "rb") as data:  # here, so that a missing or unreadable file is told by the system's own words
        found = os.fstat(data.fileno()).st_size
        if size is not None and found != size:
            raise CheckpointError(f"{file} is {'truncated' if found < size else 'damaged'}: {found} of {size} bytes")
        if sha256 is not None:
            digest = hashlib.sha256()
            while chunk := data.read(_CHUNK):
                digest.update(chunk)
            if digest.hexdigest() != sha256:
                raise CheckpointError(f"{file} is damaged: its bytes are not those that were written (SHA-256 differs)")
    try:
        try:
            return dict(load_file(file))
        except (TypeError, KeyError, AttributeError):  # how versions of the library say that numpy has no such dtype
            return {name: _from_bytes(name, **view) for name, view in _views(file)}
    except SafetensorError as error:
        raise CheckpointError(f"{file} is not a whole safetensors file: {error}") from error


def _views(file: Path) -> list[tuple[str, dict[str, Any]]]:
    from safetensors import deserialize

    views: list[tuple[str, dict[str, Any]]] = deserialize(file.read_bytes())  # type: ignore[no-untyped-call]
    return views


def _from_bytes(name: str, dtype: str, shape: list[int], data: Any) -> Array:
    if dtype == "BF16":
        widened: Array = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
        return widened
    for own, code in _CODES.items():
        if code == dtype:
            array: Array = np.frombuffer(data, np.dtype(own)).reshape(shape).copy()
            return array
    raise CheckpointError(f"{name} has dtype {dtype}, which numpy does not have: convert it to float32 first")

"""Named arrays in one safetensors file.

The format is a header and the bytes. Reading and writing it here, in one pass over a file that is opened once, gives
the checksum without a second copy in memory or a second look at a file that another process may replace meanwhile, and
a file is written under a name and with permissions that we choose (the library's writer leaves a .tmp file of mode
0600 behind when it is killed, and its reader needs the path).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from unidist.checkpoint import expect
from unidist.checkpoint.layout import open_file
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
_DTYPES = {code: np.dtype(name).newbyteorder("<") for name, code in _CODES.items() if name != "bfloat16"}
_CHUNK = 16 << 20
_LONGEST_HEADER = 100_000_000  # the library's own bound
_MOST_DIMENSIONS = 32  # numpy's, before 2.0


def check(name: str, array: Any) -> Array:
    """`array` ready to be written: C order, little-endian, a dtype that the format has."""
    if not isinstance(array, (np.ndarray, np.generic)):
        raise UsageError(f"{name} is of type {type(array).__name__}, it must be a numpy array")
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


def load(file: Path, size: int | None = None, sha256: str | None = None) -> tuple[dict[str, Array], str]:
    """The arrays of a file and its SHA-256; with `size` and `sha256`, only if it still is what was written.

    bfloat16, which numpy lacks, comes as float32: the same values.
    """
    with open_file(file) as data:
        found = os.fstat(data.fileno()).st_size
        if size is not None and found != size:
            raise CheckpointError(f"{file} is {'truncated' if found < size else 'damaged'}: {found} of {size} bytes")
        digest = hashlib.sha256()
        arrays: dict[str, Array] = {}
        try:
            for name, code, shape in _header(data, found, digest):
                arrays[name] = _read_array(data, name, code, shape, digest)
        except (CheckpointError, ValueError, MemoryError) as error:
            raise CheckpointError(f"{file} is damaged, or is not a whole safetensors file: {error}") from error
    if sha256 is not None and digest.hexdigest() != sha256:
        raise CheckpointError(f"{file} is damaged: its bytes are not those that were written (SHA-256 differs)")
    return arrays, digest.hexdigest()


def _header(data: BinaryIO, size: int, digest: Any) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(name, code of the dtype, shape) of each array, in the order of their bytes, which they fill without a gap."""
    first = bytearray(8)
    _fill(data, memoryview(first), digest)
    length = int.from_bytes(first, "little")
    if length > min(size - 8, _LONGEST_HEADER):
        raise CheckpointError(f"its header would be {length} bytes long")
    written = bytearray(length)
    _fill(data, memoryview(written), digest)
    try:
        entries = expect.mapping("its header", json.loads(written.decode()))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"its header is no JSON: {error}") from error
    entries.pop("__metadata__", None)
    end = 0
    described = {name: _described(name, entry) for name, entry in entries.items()}
    for name, (begin, stop, code, shape) in sorted(described.items(), key=lambda pair: pair[1][:2]):
        if begin != end or stop - begin != math.prod(shape) * _width(name, code):
            raise CheckpointError(f"{name!r} is said to be at bytes {begin} to {stop}")
        end = stop
        yield name, code, shape
    if 8 + length + end != size:
        raise CheckpointError(f"its arrays end at byte {8 + length + end} of {size}")


def _described(name: str, entry: object) -> tuple[int, int, str, tuple[int, ...]]:
    said = expect.mapping(f"the entry {name!r}", entry)
    shape, offsets = said.get("shape"), said.get("data_offsets")
    if not isinstance(shape, list) or len(shape) > _MOST_DIMENSIONS:
        raise expect.refuse(f"the shape of {name!r}", shape, "a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2:
        raise expect.refuse(f"the place of {name!r}", offsets, "where it begins and ends")
    begin, stop = (expect.whole(f"the place of {name!r}", offset) for offset in offsets)
    sizes = tuple(expect.whole(f"the shape of {name!r}", length) for length in shape)
    return begin, stop, expect.text(f"the dtype of {name!r}", said.get("dtype")), sizes


def _width(name: str, code: str) -> int:
    if code == "BF16":
        return 2
    if code not in _DTYPES:
        raise CheckpointError(f"{name!r} has dtype {code}, which numpy does not have: convert it to float32 first")
    width: int = _DTYPES[code].itemsize
    return width


def _read_array(data: BinaryIO, name: str, code: str, shape: tuple[int, ...], digest: Any) -> Array:
    array: Array = np.empty(shape, np.dtype("<u2") if code == "BF16" else _DTYPES[code])
    _fill(data, array.reshape(-1).view(np.uint8).data, digest)
    if code == "BF16":
        widened: Array = (array.astype(np.uint32) << 16).view(np.float32)
        return widened
    if code == "BOOL" and array.size and array.view(np.uint8).max() > 1:
        raise CheckpointError(f"{name!r} holds bytes that are no bools")
    return array


def _fill(data: BinaryIO, into: memoryview, digest: Any) -> None:
    done = 0
    while done < len(into):
        count = data.readinto(into[done : done + _CHUNK])  # type: ignore[attr-defined]
        if not count:
            raise CheckpointError("it is truncated")
        digest.update(into[done : done + count])
        done += count

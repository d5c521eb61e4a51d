"""Where samples come from: arrays, read many batches at a time, or a data set, read by the framework's own loader."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from unidist.data.order import Epoch
from unidist.errors import UsageError

if TYPE_CHECKING:
    from unidist.backend import Backend

Array = np.ndarray[Any, Any]

BLOCK_BYTES = 4 << 20  # gathered at once: large enough to hide the cost of a call, small enough for a cache


class Source(Protocol):
    size: int

    def read(self, plan: Epoch, rank: int) -> Generator[Any, None, None]:
        """The batches of every step of the plan, for this rank, on the device."""


class Share(NamedTuple):
    """What is left to this rank in a pass over iterable data."""

    skip: int  # elements that were consumed before a resume, by all ranks
    batch: int  # elements in a global batch
    places: range  # of this rank in a global batch
    epoch: int


@dataclass(frozen=True)
class NativeLoader:
    """A data set to be read by the framework's own loader, or what was found inside one that the user made."""

    dataset: Any
    workers: int = 0
    pin_memory: bool = False
    collate: Callable[[list[Any]], Any] | None = None  # None: the framework's own
    keep_float64: bool = False
    native: Any = None  # the user's loader, for settings that only the framework knows
    batch_size: int = 0  # of the user's loader
    shuffle: bool = False
    seed: int | None = None  # of the user's loader, where it says one
    drop_last: bool = False
    iterable: bool = False
    parted: bool = False  # iterable data that gives each rank a part of its own, of any size
    stream: Share | None = None  # of iterable data, in `read_batches`


class DataSetSource:
    """A map-style data set: `len()` and `[i]`."""

    def __init__(self, native: NativeLoader, backend: Backend) -> None:
        self._native, self._backend = native, backend
        self.size = len(native.dataset)
        if self.size == 0:
            raise UsageError("data holds no samples")

    def read(self, plan: Epoch, rank: int) -> Generator[Any, None, None]:
        batches = [plan.rows(rank, step).tolist() for step in range(plan.steps)]
        with self._backend.read_batches(self._native, batches) as reading:
            yield from reading


class ArraySource:
    """Arrays, memory maps, and tuples or dicts of them: gathered by index, with no Python per sample."""

    def __init__(self, data: Any, *, prefetch: bool, keep_float64: bool, to_device: Callable[[Array], Any]) -> None:
        self._columns, self._assemble = _columns(data)
        self._prefetch, self._keep_float64, self._to_device = prefetch, keep_float64, to_device
        self.size = len(self._columns[0])

    def read(self, plan: Epoch, rank: int) -> Generator[Any, None, None]:
        sample_bytes = sum(column[:1].nbytes for column in self._columns) or 1
        span = max(1, BLOCK_BYTES // (sample_bytes * plan.batch.per_worker))
        if plan.steps == 0:
            return
        blocks = [(first, min(first + span, plan.steps)) for first in range(0, plan.steps, span)]
        reading = self._read_ahead([plan.indices(rank, *block) for block in blocks])
        try:
            for (first, stop), columns in zip(blocks, reading, strict=True):
                begin = 0
                for step in range(first, stop):
                    end = begin + plan.counts(rank, step).rows
                    yield self._assemble([self._to_device(column[begin:end]) for column in columns])
                    begin = end
        finally:
            reading.close()

    def _read_ahead(self, blocks: Sequence[Array]) -> Generator[list[Array], None, None]:
        """Each block's columns; the next block is read by a thread while the loop works on this one."""
        if not self._prefetch or len(blocks) == 1:
            yield from map(self._gather, blocks)
            return
        reader = ThreadPoolExecutor(1, thread_name_prefix="unidist-loader")
        try:
            coming = reader.submit(self._gather, blocks[0])
            for block in blocks[1:]:
                ready, coming = coming.result(), reader.submit(self._gather, block)
                yield ready
            yield coming.result()
        finally:
            reader.shutdown(wait=False, cancel_futures=True)

    def _gather(self, indices: Array) -> list[Array]:
        return [self._convert(np.take(column, indices, axis=0)) for column in self._columns]

    def _convert(self, column: Array) -> Array:
        """float64 becomes float32 unless told; one integer for each sample is a label, and labels are int64."""
        if column.dtype == np.float64 and not self._keep_float64:
            return column.astype(np.float32)
        if column.dtype.kind in "iu" and column.ndim == 1:
            return column.astype(np.int64, copy=False)
        return column if column.dtype.isnative else column.astype(column.dtype.newbyteorder("="))


def is_arrays(data: Any) -> bool:
    """Lists count: they are refused there with the advice to make arrays of them."""
    return isinstance(data, (Mapping, tuple, list, str, Path)) or hasattr(data, "__array__")


def elements_of(stream: Any, *, skip: int, batch: int, share: range, worker: int, workers: int) -> Iterator[Any]:
    """The elements of a stream that one worker of one rank keeps.

    Element i, counted after `skip`, belongs to global batch i // batch; in it, to the rank whose `share` holds
    i % batch; there, to the worker whose turn the batch is. So the global batches hold the same elements at every
    world size and number of workers.
    """
    for i, element in enumerate(stream, -skip):
        number, place = divmod(i, batch)
        if i >= 0 and place in share and number % workers == worker:
            yield element


def _columns(data: Any) -> tuple[list[Array], Callable[[list[Any]], Any]]:
    """The arrays in `data`, and how to put a batch of them together again in the same form."""
    assemble: Callable[[list[Any]], Any]
    if isinstance(data, Mapping):
        keys = list(data)
        columns = [_array(data[key], f"data[{key!r}]") for key in keys]
        assemble = lambda parts: dict(zip(keys, parts, strict=True))  # noqa: E731
    elif isinstance(data, (tuple, list)):
        columns, assemble = [_array(item, f"data[{i}]") for i, item in enumerate(data)], tuple
    else:
        columns, assemble = [_array(data, "data")], lambda parts: parts[0]
    if not columns:
        raise UsageError("data holds no arrays")
    lengths = [len(column) for column in columns]
    if min(lengths) != max(lengths):
        raise UsageError(f"the arrays in data differ in length: {lengths}; the first axis counts samples")
    if lengths[0] == 0:
        raise UsageError("data holds no samples")
    return columns, assemble


def _array(value: Any, name: str) -> Array:
    if isinstance(value, (str, Path)):
        path = Path(value)
        if path.suffix != ".npy" or not path.is_file():
            raise UsageError(f"{name}: {str(path)!r} is not an existing .npy file")
        value = np.load(path, mmap_mode="r", allow_pickle=False)
    if not hasattr(value, "__array__"):
        raise UsageError(
            f"{name} is of type {type(value).__name__}: the loader takes numpy arrays, paths of .npy files, tuples or "
            "dicts of them, data sets and data loaders. Wrap plain lists in numpy.asarray."
        )
    array: Array = np.asanyarray(value)  # keeps a memory map a memory map
    if array.ndim == 0 or array.dtype.hasobject:
        raise UsageError(
            f"{name} has shape {array.shape} and dtype {array.dtype}: it needs a sample axis and plain numbers"
        )
    return array

"""The loader over arrays: batches are gathered by index, many at a time, with no Python per sample."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from unidist.data.batch import Batch
from unidist.data.order import Epoch, Tail
from unidist.errors import UsageError

Array = np.ndarray[Any, Any]

BLOCK_BYTES = 4 << 20  # gathered at once: large enough to hide the cost of a call, small enough for a cache


class Drawn(NamedTuple):
    """The batch that a loader has just handed out."""

    epoch: Epoch
    step: int
    rows: int  # as delivered
    real: int  # of these, samples
    total: int  # samples on all ranks

    @property
    def weight(self) -> float:
        """Factor that makes the mean over ranks of local mean losses the mean over the global batch."""
        return self.real * self.epoch.batch.workers / self.total

    @property
    def uneven(self) -> bool:
        """Whether the ranks hold different numbers of samples."""
        return self.total % self.epoch.batch.workers != 0

    @property
    def last(self) -> bool:
        return self.step == self.epoch.steps - 1


class Loader:
    """Iterate it: each full pass is a new epoch with a new order, and every rank makes the same number of steps.

    Attributes: `batch` (the arithmetic), `epoch` (number of the next pass), `len()` (steps in a pass),
    `size` (samples in the data set). A pass that is left early counts: the next one is a new epoch.
    """

    def __init__(
        self,
        data: Any,
        batch: Batch,
        *,
        rank: int,
        shuffle: bool,
        seed: int,
        tail: Tail,
        prefetch: bool,
        keep_float64: bool,
        to_device: Callable[[Array], Any],
        on_batch: Callable[[Drawn], None],
        on_end: Callable[[Epoch], None],
    ) -> None:
        self._columns, self._assemble = _columns(data)
        self.size = len(self._columns[0])
        self.batch = batch
        self._rank, self._shuffle, self._seed, self._tail = rank, shuffle, seed, tail
        self._prefetch, self._keep_float64 = prefetch, keep_float64
        self._to_device, self._on_batch, self._on_end = to_device, on_batch, on_end
        self.epoch = 0
        self._next = self._plan(0)

    def __len__(self) -> int:
        return self._next.steps

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass the one numbered `epoch`. Only needed to repeat or to skip: passes count themselves."""
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise UsageError(f"epoch is {epoch!r}, it must be a whole number from 0")
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        plan = self._next = self._plan(self.epoch)
        self.epoch += 1
        return self._pass(plan)

    def _plan(self, number: int) -> Epoch:
        return Epoch(self.size, self.batch, number=number, shuffle=self._shuffle, seed=self._seed, tail=self._tail)

    def _pass(self, plan: Epoch) -> Iterator[Any]:
        sample_bytes = sum(column[:1].nbytes for column in self._columns) or 1
        span = max(1, BLOCK_BYTES // (sample_bytes * self.batch.per_worker))
        blocks = [(first, min(first + span, plan.steps)) for first in range(0, plan.steps, span)]
        reading = self._read_ahead(plan, blocks)
        try:
            for (first, stop), columns in zip(blocks, reading, strict=True):
                begin = 0
                for step in range(first, stop):
                    rows = plan.rows(self._rank, step)
                    end = begin + len(rows.indices)
                    batch = self._assemble([self._to_device(column[begin:end]) for column in columns])
                    begin = end
                    # Told before the batch is handed out: the loop body that follows belongs to it.
                    self._on_batch(Drawn(plan, step, len(rows.indices), rows.real, rows.total))
                    yield batch
        finally:  # also when the loop was left early
            reading.close()
            self._on_end(plan)

    def _read_ahead(self, plan: Epoch, blocks: list[tuple[int, int]]) -> Generator[list[Array], None, None]:
        """Each block's columns; the next block is read by a thread while the loop works on this one."""
        if not self._prefetch or len(blocks) == 1:
            for first, stop in blocks:
                yield self._read(plan, first, stop)
            return
        reader = ThreadPoolExecutor(1, thread_name_prefix="unidist-loader")
        try:
            coming = reader.submit(self._read, plan, *blocks[0])
            for block in blocks[1:]:
                ready, coming = coming.result(), reader.submit(self._read, plan, *block)
                yield ready
            yield coming.result()
        finally:
            reader.shutdown(wait=False, cancel_futures=True)

    def _read(self, plan: Epoch, first: int, stop: int) -> list[Array]:
        indices = plan.indices(self._rank, first, stop)
        return [self._convert(np.take(column, indices, axis=0)) for column in self._columns]

    def _convert(self, column: Array) -> Array:
        """float64 becomes float32 unless told; one integer for each sample is a label, and labels are int64."""
        if column.dtype == np.float64 and not self._keep_float64:
            return column.astype(np.float32)
        if column.dtype.kind in "iu" and column.ndim == 1:
            return column.astype(np.int64, copy=False)
        return column if column.dtype.isnative else column.astype(column.dtype.newbyteorder("="))


def _columns(data: Any) -> tuple[list[Array], Callable[[list[Any]], Any]]:
    """The arrays in `data`, and how to put a batch of them together again in the same form."""
    assemble: Callable[[list[Any]], Any]
    if isinstance(data, Mapping):
        keys = list(data)
        columns = [_array(data[key], f"data[{key!r}]") for key in keys]
        assemble = lambda parts: dict(zip(keys, parts, strict=True))  # noqa: E731
    elif isinstance(data, (tuple, list)):
        columns, assemble = [_array(each, f"data[{i}]") for i, each in enumerate(data)], tuple
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
            f"{name} is a {type(value).__name__}: the loader takes numpy arrays, paths of .npy files, and tuples or "
            "dicts of them. Wrap plain lists in numpy.asarray."
        )
    array: Array = np.asanyarray(value)  # keeps a memory map a memory map
    if array.ndim == 0 or array.dtype.hasobject:
        raise UsageError(
            f"{name} has shape {array.shape} and dtype {array.dtype}: it needs a sample axis and plain numbers"
        )
    return array

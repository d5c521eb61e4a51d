"""mx.io iterators, which read their part of a file themselves: unidist says which part, and makes a new one each epoch.

They come as `functools.partial(mx.io.ImageRecordIter, …)`, not made yet, because an iterator that is made
- does not tell of which part it is, nor whether it knows parts at all: CSVIter takes num_parts and ignores it;
- counts its padding right in its first epoch only. In the next ones it leaves out what it had padded with, and reports
  padding in the middle; with round_batch=False it reports none where there is some.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import mxnet as mx

from unidist.plugin import NativeLoader, UsageError, is_whole

ADVICE = (
    "pass functools.partial(mx.io.ImageRecordIter, batch_size=…, …), which unidist calls with the part of each rank, "
    "or a data set such as gluon.data.vision.ImageRecordDataset"
)
OURS = ("num_parts", "part_index", "round_batch", "seed", "seed_aug", "shuffle_chunk_seed")


def open_iterator(data: object) -> NativeLoader | None:
    if isinstance(data, mx.io.NDArrayIter):
        raise UsageError("NDArrayIter holds arrays: pass these to strategy.loader, all of them on every rank")
    if isinstance(data, mx.io.DataIter):
        raise UsageError(f"this {type(data).__name__} is made already, and does not tell of which part: {ADVICE}")
    if not isinstance(data, functools.partial) or getattr(mx.io, data.func.__name__, None) is not data.func:
        return None
    name, known = data.func.__name__, _parameters(data.func)
    if not {"num_parts", "round_batch"} <= known:
        raise UsageError(f"{name} cannot read a part of its data and all of that part: {ADVICE}")
    given = [name for name in OURS if name in data.keywords]
    if given:
        raise UsageError(f"leave {', '.join(given)} out of {name}: they follow from the rank, and seed= of the loader")
    size = data.keywords.get("batch_size")
    if not is_whole(size, 1):
        raise UsageError(f"{name} has batch_size={size!r}: give it the batch of a device, a whole number from 1")
    return NativeLoader(data, batch_size=size, iterable=True, parted=True)


def read_part(source: NativeLoader, context: mx.Context) -> Iterator[tuple[int, Any]]:
    """(samples, batch) on the device. A batch is data and labels, as the iterator makes them."""
    assert source.stream is not None
    skip, whole, share, epoch = source.stream
    make, known = source.dataset, _parameters(source.dataset.func)
    parts, part, size = whole // len(share), share.start // len(share), len(share)
    seed = ((source.seed or 0) * 1_000_003 + epoch) * parts + part  # else every epoch would be augmented the same way
    settings = {"verbose": False, **make.keywords, "num_parts": parts, "part_index": part, "batch_size": size}
    settings |= {"round_batch": True, **dict.fromkeys(("seed", "seed_aug", "shuffle_chunk_seed"), seed % 2**31)}
    try:
        iterator = make.func(**{key: value for key, value in settings.items() if key in known or key in make.keywords})
    except StopIteration:  # it looks at its first batch: this part is empty
        return
    skipped = None
    for number, batch in enumerate(iterator):
        real = size - batch.pad
        # Copies: the iterator fills the same memory again while this batch is still in use.
        ready = tuple(array[:real].copyto(context) for array in (*batch.data, *batch.label))
        if number < skip // whole:
            skipped = ready
        else:
            skipped = None
            yield real, ready
    if skipped is not None:  # all of this part was read before the resume, other parts were not
        yield 0, skipped


@functools.cache
def _parameters(creator: Any) -> frozenset[str]:
    return frozenset(re.findall(r"^(\w+) : ", creator.__doc__ or "", re.MULTILINE))

"""torch's own DataLoader: what is inside one, and how to read with one in unidist's order."""

from contextlib import contextmanager

import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

from unidist.data.source import OwnLoader, elements_of
from unidist.errors import UsageError


def open_loader(loader, world) -> OwnLoader | None:
    if not isinstance(loader, DataLoader):
        return None
    if loader.batch_size is None:
        raise UsageError("the DataLoader has no batch_size: make it with one, or pass its data set to strategy.loader")
    sampler, shuffle, seed = loader.sampler, False, None
    iterable = isinstance(loader.dataset, IterableDataset)
    if isinstance(sampler, DistributedSampler):
        if (sampler.rank, sampler.num_replicas) != (world.rank, world.world_size):
            raise UsageError(
                f"the DataLoader's DistributedSampler says rank {sampler.rank} of {sampler.num_replicas}, this is rank "
                f"{world.rank} of {world.world_size}: leave the sampler out, unidist brings its own"
            )
        shuffle, seed = sampler.shuffle, sampler.seed
    elif isinstance(sampler, RandomSampler) and not sampler.replacement and sampler._num_samples is None:
        shuffle = True
    elif not isinstance(sampler, SequentialSampler) and not iterable:
        raise UsageError(
            f"the DataLoader draws by {type(sampler).__name__}, whose order cannot be shared out: use shuffle=True or "
            "False there"
        )
    return OwnLoader(
        loader.dataset,
        workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        collate=loader.collate_fn,
        native=loader,
        batch_size=loader.batch_size,
        shuffle=shuffle,
        seed=seed,
        drop_last=loader.drop_last,
        iterable=iterable,
    )


@contextmanager
def read_batches(source: OwnLoader, batches, device):
    settings = {"num_workers": source.workers, "pin_memory": source.pin_memory, "collate_fn": source.collate}
    if source.native is not None:
        for name in ("timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor", "generator"):
            settings[name] = getattr(source.native, name)
    if batches is not None:
        loader = DataLoader(source.dataset, batch_sampler=batches, **settings)
    else:
        skip, batch, share, _ = source.stream
        settings["collate_fn"] = _Counted(source.collate or default_collate)
        loader = DataLoader(_Part(source.dataset, skip, batch, share), batch_size=len(share), **settings)
    reading = iter(loader)
    try:
        yield (_ready(batch, device, source.keep_float64) for batch in reading)
    finally:
        if hasattr(reading, "_shutdown_workers"):
            reading._shutdown_workers()  # else they end whenever the garbage collector comes by


class _Part(IterableDataset):
    """What one worker of this rank keeps of a stream."""

    def __init__(self, stream, skip, batch, share):
        self._stream, self._skip, self._batch, self._share = stream, skip, batch, share

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        # A stream that splits itself by worker would be split twice: it is to believe that it is alone.
        torch.utils.data._utils.worker._worker_info = None
        return elements_of(
            self._stream, skip=self._skip, batch=self._batch, share=self._share, worker=worker, workers=workers
        )


class _Counted:
    """Collates, and says how many elements went in: nobody can tell from what came out."""

    def __init__(self, collate):
        self._collate = collate

    def __call__(self, elements):
        return len(elements), self._collate(elements)


def _ready(batch, device, keep_float64):
    """On the device, with the same dtypes as arrays arrive: float64 as float32, labels int64."""
    if isinstance(batch, torch.Tensor):
        if batch.dtype == torch.float64 and not keep_float64:
            batch = batch.float()
        elif batch.dim() == 1 and batch.dtype in (torch.uint8, torch.int8, torch.int16, torch.int32):
            batch = batch.long()
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: _ready(each, device, keep_float64) for key, each in batch.items()}
    if isinstance(batch, (list, tuple)):
        parts = [_ready(each, device, keep_float64) for each in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)
    return batch

"""Data loaders with the interface of torch.utils.data: what is inside one, and how to read with one in our order.

For frameworks that have it: each function takes the framework's own module of that shape as `package`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from unidist.data.nested import map_leaves
from unidist.data.source import NativeLoader, elements_of
from unidist.errors import UsageError

if TYPE_CHECKING:
    from unidist.world import World


def open_loader(loader: Any, package: Any, world: World) -> NativeLoader | None:
    if not isinstance(loader, package.DataLoader):
        return None
    if loader.batch_size is None:
        raise UsageError("the DataLoader has no batch_size: make it with one, or pass its data set to strategy.loader")
    sampler, shuffle, seed = loader.sampler, False, None
    iterable = isinstance(loader.dataset, package.IterableDataset)
    if isinstance(sampler, package.DistributedSampler):
        if (sampler.rank, sampler.num_replicas) != (world.rank, world.world_size):
            raise UsageError(
                f"the DataLoader's DistributedSampler says rank {sampler.rank} of {sampler.num_replicas}, this is rank "
                f"{world.rank} of {world.world_size}: leave the sampler out, unidist brings its own"
            )
        shuffle, seed = sampler.shuffle, sampler.seed
    elif isinstance(sampler, package.RandomSampler) and not sampler.replacement and sampler._num_samples is None:
        shuffle = True
    elif not isinstance(sampler, package.SequentialSampler) and not iterable:
        raise UsageError(
            f"the DataLoader draws by {type(sampler).__name__}, whose order cannot be shared out: use shuffle=True or "
            "False there"
        )
    return NativeLoader(
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
def read_batches(
    source: NativeLoader, batches: Sequence[Sequence[int]] | None, package: Any, part: type[Part], collate: Any
) -> Iterator[Iterator[Any]]:
    """Batches as the framework's loader collates them. `part` is the framework's Part, `collate` its own collation."""
    settings = {"num_workers": source.workers, "pin_memory": source.pin_memory, "collate_fn": source.collate}
    if source.native is not None:
        for name in ("timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor", "generator"):
            settings[name] = getattr(source.native, name)
    if batches is not None:
        loader = package.DataLoader(source.dataset, batch_sampler=batches, **settings)
    else:
        assert source.stream is not None
        settings["collate_fn"] = _Counted(source.collate or collate)
        skip, batch, share, _ = source.stream
        loader = package.DataLoader(part(source.dataset, skip, batch, share), batch_size=len(share), **settings)
    reading = iter(loader)
    try:
        yield reading
    finally:
        if hasattr(reading, "_shutdown_workers"):
            reading._shutdown_workers()  # else they end whenever the garbage collector comes by


class Part:
    """What one worker of this rank keeps of a stream. A framework's is an IterableDataset of its own, too."""

    def __init__(self, stream: Any, skip: int, batch: int, share: range) -> None:
        self._stream, self._skip, self._batch, self._share = stream, skip, batch, share

    def as_worker(self) -> tuple[int, int]:
        """(number of this worker, number of workers). From then on the stream must believe that it is alone: one that
        splits itself by worker would be split twice."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        worker, workers = self.as_worker()
        return elements_of(
            self._stream, skip=self._skip, batch=self._batch, share=self._share, worker=worker, workers=workers
        )


class _Counted:
    """Collates, and says how many elements went in: nobody can tell from what came out."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, elements: list[Any]) -> tuple[int, Any]:
        return len(elements), self._collate(elements)


def map_tensors(batch: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """A batch with `change` done to every tensor of type `kind` in it. Lists become tuples, as with array data."""
    return map_leaves(lambda leaf: change(leaf) if isinstance(leaf, kind) else leaf, batch, lists=tuple)

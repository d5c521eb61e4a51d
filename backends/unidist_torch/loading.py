"""torch's own DataLoader: what is inside one, and how to read with one in unidist's order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import data

from unidist.plugin import NativeLoader, World, torch_shaped


def open_loader(loader: object, world: World) -> NativeLoader | None:
    return torch_shaped.open_loader(loader, data, world)


@contextmanager
def read_batches(
    source: NativeLoader, batches: Sequence[Sequence[int]] | None, device: torch.device
) -> Iterator[Iterator[Any]]:
    def ready(tensor: torch.Tensor) -> torch.Tensor:
        """On the device, with the same dtypes as arrays arrive: float64 as float32, labels int64."""
        if tensor.dtype == torch.float64 and not source.keep_float64:
            tensor = tensor.float()
        elif tensor.dim() == 1 and tensor.dtype in (torch.uint8, torch.int8, torch.int16, torch.int32):
            tensor = tensor.long()
        return tensor.to(device, non_blocking=True)

    with torch_shaped.read_batches(source, batches, data, _Part, data.default_collate) as reading:
        yield (torch_shaped.map_tensors(batch, torch.Tensor, ready) for batch in reading)


class _Part(torch_shaped.Part, data.IterableDataset):  # type: ignore[misc]  # torch is not there to be checked
    def as_worker(self) -> tuple[int, int]:
        info = data.get_worker_info()
        data._utils.worker._worker_info = None
        return (info.id, info.num_workers) if info else (0, 1)

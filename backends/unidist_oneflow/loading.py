"""OneFlow's own DataLoader: what is inside one, and how to read with one in unidist's order."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import oneflow as flow
from oneflow.utils import data

from unidist.plugin import NativeLoader, World, torch_shaped


def open_loader(loader: object, world: World) -> NativeLoader | None:
    return torch_shaped.open_loader(loader, data, world)


@contextmanager
def read_batches(source: NativeLoader, batches: Sequence[Sequence[int]] | None, device: str) -> Iterator[Iterator[Any]]:
    def ready(tensor: Any) -> Any:
        """On the device, with the same dtypes as arrays arrive: float64 as float32, labels int64."""
        if tensor.dtype == flow.float64 and not source.keep_float64:
            tensor = tensor.to(flow.float32)
        elif tensor.dim() == 1 and tensor.dtype in (flow.uint8, flow.int8, flow.int32):
            tensor = tensor.to(flow.int64)
        return tensor.to(device)

    collate = data.dataloader.default_collate
    with torch_shaped.read_batches(source, batches, data, _Part, collate) as reading:
        yield (torch_shaped.map_tensors(batch, flow.Tensor, ready) for batch in reading)


class _Part(torch_shaped.Part, data.IterableDataset):  # type: ignore[misc]  # OneFlow is not there to be checked
    def as_worker(self) -> tuple[int, int]:
        info = data.get_worker_info()
        data._utils.worker._worker_info = None
        return (info.id, info.num_workers) if info else (0, 1)

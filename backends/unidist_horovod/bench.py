"""What `unidist bench step --backend horovod` compares: Horovod as its tutorials write it, and through unidist."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from itertools import islice
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

import unidist

if TYPE_CHECKING:
    import mxnet as mx
    from torch.utils.data import DataLoader

Array = np.ndarray[Any, Any]
SAMPLES, FEATURES, CLASSES, BATCH = 12800, 784, 10, 64


def contestants(strategy: unidist.Strategy) -> dict[str, Callable[[int], None]]:
    numbers = np.random.RandomState(0)
    x = numbers.standard_normal((SAMPLES, FEATURES)).astype(np.float32)
    y = numbers.randint(0, CLASSES, SAMPLES)
    loops = {"torch": on_torch, "mxnet": on_mxnet}[strategy.framework]
    return loops(strategy, import_module(f"unidist_{strategy.framework}.bench"), x, y)


def on_torch(strategy: unidist.Strategy, alone: ModuleType, x: Array, y: Array) -> dict[str, Callable[[int], None]]:
    import horovod.torch as hvd
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.distributed import DistributedSampler

    cross_entropy = torch.nn.functional.cross_entropy
    dataset = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))

    def data_loader() -> DataLoader[Any]:
        sampler = DistributedSampler(dataset, num_replicas=strategy.world_size, rank=strategy.rank, seed=0)
        return DataLoader(dataset, batch_size=BATCH, sampler=sampler)

    by_hand = alone.mlp()
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.01, momentum=0.9)
    hvd.broadcast_parameters(by_hand.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=by_hand.named_parameters())
    batches = alone.endless(data_loader())

    def hand_written(steps: int) -> None:
        for inputs, labels in islice(batches, steps):
            optimizer.zero_grad()
            cross_entropy(by_hand(inputs), labels).backward()
            optimizer.step()

    def through_unidist(loader: Iterable[Any]) -> Callable[[int], None]:
        model, sgd = strategy.prepare(alone.mlp(), unidist.SGD(0.01, momentum=0.9))
        step = strategy.train_step(model, sgd, lambda m, inputs, labels: cross_entropy(m(inputs), labels))
        return _runner(alone.endless(loader), step)

    return {
        "DistributedOptimizer by hand, DataLoader": hand_written,
        "unidist, the same DataLoader": through_unidist(data_loader()),
        "unidist, array data": through_unidist(strategy.loader((x, y), per_device_batch=BATCH, shuffle=True)),
    }


def on_mxnet(strategy: unidist.Strategy, alone: ModuleType, x: Array, y: Array) -> dict[str, Callable[[int], None]]:
    import horovod.mxnet as hvd
    import mxnet as mx

    share = slice(strategy.rank, None, strategy.world_size)
    ready = mx.io.NDArrayIter(
        x[share], y[share].astype(np.float32), batch_size=BATCH, shuffle=True, last_batch_handle="discard"
    )
    by_hand = alone.mlp()
    hvd.broadcast_parameters(by_hand.collect_params(), root_rank=0)
    trainer = hvd.DistributedTrainer(by_hand.collect_params(), "sgd", {"learning_rate": 0.01, "momentum": 0.9})
    batches = alone.endless_io(ready)

    def hand_written(steps: int) -> None:
        for inputs, labels in islice(batches, steps):
            with mx.autograd.record():
                loss = alone.softmax_cross_entropy(by_hand(inputs), labels)
            loss.backward()
            trainer.step(BATCH)
        mx.nd.waitall()

    def mean_loss(model: mx.gluon.HybridBlock, inputs: mx.nd.NDArray, labels: mx.nd.NDArray) -> mx.nd.NDArray:
        return alone.softmax_cross_entropy(model(inputs), labels).mean()

    model, sgd = strategy.prepare(alone.mlp(), unidist.SGD(0.01, momentum=0.9))
    loader = strategy.loader((x, y.astype(np.float32)), per_device_batch=BATCH, shuffle=True)
    return {
        "DistributedTrainer by hand, NDArrayIter": hand_written,
        "unidist, array data": _runner(
            alone.endless(loader), strategy.train_step(model, sgd, mean_loss), mx.nd.waitall
        ),
    }


def _runner(
    batches: Iterator[Any], step: Callable[..., Any], settle: Callable[[], None] = lambda: None
) -> Callable[[int], None]:
    def run(steps: int) -> None:
        for inputs, labels in islice(batches, steps):
            step(inputs, labels)
        settle()

    return run

"""What `unidist bench step --backend torch` compares: DDP as its tutorial writes it, and the same through unidist."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import unidist

SAMPLES, FEATURES, CLASSES, BATCH = 12800, 784, 10, 64


def contestants(strategy: unidist.Strategy) -> dict[str, Callable[[int], None]]:
    numbers = np.random.RandomState(0)
    x = numbers.standard_normal((SAMPLES, FEATURES)).astype(np.float32)
    y = numbers.randint(0, CLASSES, SAMPLES)
    dataset = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))

    def data_loader() -> DataLoader[Any]:
        return DataLoader(dataset, batch_size=BATCH, sampler=DistributedSampler(dataset, seed=0))

    by_hand = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.01, momentum=0.9)

    batches = endless(data_loader())

    def hand_written(steps: int) -> None:
        for inputs, labels in islice(batches, steps):
            loss = nn.functional.cross_entropy(by_hand(inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def through_unidist(loader: Iterable[Any]) -> Callable[[int], None]:
        model, sgd = strategy.prepare(mlp(), unidist.SGD(0.01, momentum=0.9))
        step = strategy.train_step(model, sgd, lambda m, inputs, labels: nn.functional.cross_entropy(m(inputs), labels))
        endless_batches = endless(loader)

        def run(steps: int) -> None:
            for inputs, labels in islice(endless_batches, steps):
                step(inputs, labels)

        return run

    return {
        "DDP by hand, DataLoader": hand_written,
        "unidist, the same DataLoader": through_unidist(data_loader()),
        "unidist, array data": through_unidist(strategy.loader((x, y), per_device_batch=BATCH, shuffle=True)),
    }


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, CLASSES))


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader

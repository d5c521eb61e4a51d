"""What `unidist bench step --backend mxnet` compares: Gluon's Trainer as its tutorial writes it, and unidist."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

import unidist
from unidist_mxnet.backend import MxnetBackend

SAMPLES, FEATURES, CLASSES, BATCH = 12800, 784, 10, 64

softmax_cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()


def contestants(strategy: unidist.Strategy) -> dict[str, Callable[[int], None]]:
    numbers = np.random.RandomState(0)
    x = numbers.standard_normal((SAMPLES, FEATURES)).astype(np.float32)
    y = numbers.randint(0, CLASSES, SAMPLES).astype(np.float32)
    share = slice(strategy.rank, None, strategy.world_size)
    dataset = gluon.data.ArrayDataset(mx.nd.array(x[share]), mx.nd.array(y[share]))
    backend = strategy._backend
    assert isinstance(backend, MxnetBackend)
    store = backend.store.kv  # MXNet hangs with two distributed stores in one process: share it

    def data_loader() -> gluon.data.DataLoader:
        return gluon.data.DataLoader(dataset, BATCH, shuffle=True, last_batch="discard")

    by_hand = mlp()
    side = backend.options.server_updates
    trainer = gluon.Trainer(
        by_hand.collect_params(),
        "sgd",
        {"learning_rate": 0.01, "momentum": 0.9},
        kvstore=store,
        update_on_kvstore=side if store is not None else None,
    )
    reserved = backend.store.keys([param.name for param in trainer._params])
    assert reserved[0] == 0, "a Trainer counts its keys from 0: unidist's must come after"
    ready = mx.io.NDArrayIter(x[share], y[share], batch_size=BATCH, shuffle=True, last_batch_handle="discard")
    batches, ready_batches = endless(data_loader()), endless_io(ready)

    def hand_written(steps: int, batches: Iterator[Any]) -> None:
        for inputs, labels in islice(batches, steps):
            with autograd.record():
                loss = softmax_cross_entropy(by_hand(inputs), labels)
            loss.backward()
            trainer.step(BATCH * strategy.world_size)
        mx.nd.waitall()

    def through_unidist(loader: Iterable[Any]) -> Callable[[int], None]:
        model, sgd = strategy.prepare(mlp(), unidist.SGD(0.01, momentum=0.9))
        step = strategy.train_step(
            model, sgd, lambda m, inputs, labels: softmax_cross_entropy(m(inputs), labels).mean()
        )
        endless_batches = endless(loader)

        def run(steps: int) -> None:
            for inputs, labels in islice(endless_batches, steps):
                step(inputs, labels)
            mx.nd.waitall()

        return run

    return {
        "Trainer by hand, NDArrayIter": lambda steps: hand_written(steps, ready_batches),
        "Trainer by hand, DataLoader": lambda steps: hand_written(steps, batches),
        "unidist, array data": through_unidist(strategy.loader((x, y), per_device_batch=BATCH, shuffle=True)),
    }


def mlp() -> nn.HybridBlock:
    model = nn.HybridSequential()
    model.add(nn.Dense(128, in_units=FEATURES, activation="relu"), nn.Dense(CLASSES, in_units=128))
    model.initialize(mx.init.Xavier())
    model.hybridize()
    return model


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def endless_io(iterator: mx.io.DataIter) -> Iterator[Any]:
    while True:
        iterator.reset()
        for batch in iterator:
            yield batch.data[0], batch.label[0]

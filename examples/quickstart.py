"""A first training on two processes: `unidist run --backend torch --nproc 2 examples/quickstart.py`."""

import numpy as np
import torch

import unidist

inputs = np.random.default_rng(0).normal(size=(1000, 8)).astype(np.float32)
targets = inputs @ np.arange(8, dtype=np.float32).reshape(8, 1)

torch.manual_seed(0)
with unidist.Strategy("torch") as strategy:
    model, optimizer = strategy.prepare(torch.nn.Linear(8, 1), unidist.SGD(lr=0.05))
    step = strategy.train_step(model, optimizer, lambda m, x, y: ((m(x) - y) ** 2).mean())
    loader = strategy.loader((inputs, targets), global_batch=50, shuffle=True)
    for epoch in range(5):
        losses = [step(x, y) for x, y in loader]
        strategy.print(f"epoch {epoch}  loss {strategy.mean(losses):.6f}")

"""Two noisy spirals, told apart by a NumPy model: `unidist run --backend sockets --nproc 2 train.py`."""

import numpy as np

import unidist

numbers = np.random.RandomState(0)
labels = np.arange(600) % 2
angle = numbers.uniform(0.5, 6.0, 600)
points = (angle * [np.cos(angle + np.pi * labels), np.sin(angle + np.pi * labels)]).T + numbers.normal(0, 0.1, (600, 2))

with unidist.Strategy() as strategy:
    from unidist_sockets import tiny

    net = tiny.Sequential(tiny.Linear(2, 32), tiny.Tanh(), tiny.Linear(32, 32), tiny.ReLU(), tiny.Linear(32, 2))
    model, optimizer = strategy.prepare(net, unidist.Adam(lr=0.01))
    step = strategy.train_step(model, optimizer, lambda m, x, y: tiny.cross_entropy(m(x), y).mean())
    loader = strategy.loader((points, labels), global_batch=60, shuffle=True)
    for _ in range(40):
        losses = [step(x, y) for x, y in loader]
    predicted = strategy.predict(model, strategy.loader(points, global_batch=60)).argmax(axis=1)
    strategy.print(f"loss {strategy.mean(losses):.6f}  accuracy {(predicted == labels).mean():.3f}")

"""A training script to start from, in OneFlow.

unidist setup oneflow                               once
unidist run --backend oneflow --nproc 2 train.py
python train.py                                     one process, in an environment that has oneflow
"""

import numpy as np

import unidist

EPOCHS = 5


def samples():
    """Points in a plane and which of two rings they lie in. Put your own arrays, data set or DataLoader here."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, size=2000)
    angle, radius = random.uniform(0, 2 * np.pi, size=2000), 1 + labels + random.normal(0, 0.1, size=2000)
    points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).astype(np.float32)
    return (points[:1600], labels[:1600]), (points[1600:], labels[1600:])


def network(flow):
    flow.manual_seed(0)
    return flow.nn.Sequential(flow.nn.Linear(2, 32), flow.nn.ReLU(), flow.nn.Linear(32, 2))


def main():
    train, test = samples()
    with unidist.Strategy() as strategy:
        import oneflow as flow  # not earlier: it reads who else takes part when it is imported

        model, optimizer = strategy.prepare(network(flow), unidist.Adam(lr=0.01))
        step = strategy.train_step(model, optimizer, lambda m, x, y: flow.nn.functional.cross_entropy(m(x), y))
        loader = strategy.loader(train, global_batch=32, shuffle=True)
        test_loader = strategy.loader(test, global_batch=32)
        for epoch in range(1, EPOCHS + 1):
            losses = [step(x, y) for x, y in loader]
            with strategy.evaluate(model):
                hits = strategy.gather([(model(x).argmax(1) == y).to(flow.float32) for x, y in test_loader])
            strategy.print(f"epoch {epoch}  loss {strategy.mean(losses):.4f}  accuracy {hits.mean():.3f}")
        strategy.save("checkpoints", model=model, optimizer=optimizer, loader=loader, keep=2)


if __name__ == "__main__":
    main()

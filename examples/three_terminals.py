"""Three processes started by hand, each in its own terminal, with the step spelled out.

    python examples/three_terminals.py --init-method tcp://127.0.0.1:22225 --rank 0 --world-size 3
    python examples/three_terminals.py --init-method tcp://127.0.0.1:22225 --rank 1 --world-size 3
    python examples/three_terminals.py --init-method tcp://127.0.0.1:22225 --rank 2 --world-size 3

They wait for each other, so the order does not matter. `--init-method file:///shared/folder/name` does without a port.
"""

import argparse

import digits
import models
import unidist


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--init-method", required=True, help="tcp://host:port of rank 0, or file:///path")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()

    train, _ = digits.load()
    with unidist.Strategy(args.backend, init=args.init_method, rank=args.rank, world_size=args.world_size) as strategy:
        zoo = models.load(strategy.framework)
        model, optimizer = strategy.prepare(zoo.cnn(seed=0), unidist.SGD(lr=0.05, momentum=0.9))
        loader = strategy.loader(train, per_device_batch=16, shuffle=True)
        strategy.log(f"batch {loader.batch}")
        for epoch in range(1, args.epochs + 1):
            losses = []
            for x, y in loader:
                with strategy.forward():
                    loss = zoo.cross_entropy(model(x), y)
                strategy.backward(loss)
                strategy.step(optimizer, clip_norm=1.0)
                losses.append(loss.detach())
            strategy.print(f"epoch {epoch}  loss {strategy.mean(losses, loader):.6f}")


if __name__ == "__main__":
    main()

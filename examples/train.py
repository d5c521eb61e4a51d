"""Train a small CNN on handwritten digits: one loop for every backend.

    unidist run --backend torch --nproc 2 examples/train.py
    torchrun --nproc-per-node 2 examples/train.py
    python examples/train.py

All three see the same samples in the same global batches and print the same losses.
"""

import argparse

import digits
import models
import unidist
from unidist.checkpoint import latest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=48, help="samples in a global batch, over all processes")
    parser.add_argument("--lr", type=float, default=0.05, help="at the start; it falls in a line to 0")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and of the order of samples")
    parser.add_argument("--checkpoint", help="folder to save to after each epoch, and to resume from if it holds one")
    parser.add_argument("--local-rank", "--local_rank", help=argparse.SUPPRESS)  # torch.distributed.launch adds it
    args = parser.parse_args()

    train, test = digits.load()
    with unidist.Strategy() as strategy:
        zoo = models.load(strategy.framework)  # imported after Strategy exists: OneFlow reads its cluster at import
        loader = strategy.loader(train, global_batch=args.batch, shuffle=True, seed=args.seed)
        test_loader = strategy.loader(test, global_batch=args.batch)
        updates = args.epochs * len(loader)
        sgd = unidist.SGD(lr=lambda update: args.lr * (1 - update / updates), momentum=0.9)
        model, optimizer = strategy.prepare(zoo.cnn(args.seed), sgd)
        step = strategy.train_step(model, optimizer, lambda m, x, y: zoo.cross_entropy(m(x), y))
        strategy.print(f"{loader.size} digits to learn from, {test_loader.size} held out; batch {loader.batch}")

        parts = {"model": model, "optimizer": optimizer, "loader": loader}
        if args.checkpoint and latest(args.checkpoint):
            strategy.load(args.checkpoint, **parts)
        for epoch in range(loader.epoch + 1, args.epochs + 1):
            losses = [step(x, y) for x, y in loader]  # every full pass is a new epoch: nothing to forget
            with strategy.evaluate(model):
                hits = strategy.gather([zoo.correct(model(x), y) for x, y in test_loader])  # each sample once
            strategy.print(f"epoch {epoch}  loss {strategy.mean(losses):.6f}  accuracy {hits.mean():.4f}")
            if args.checkpoint:
                strategy.save(args.checkpoint, **parts, keep=2)


if __name__ == "__main__":
    main()

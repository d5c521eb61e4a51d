"""Distributed inference: every rank predicts its share, the results come back in data-set order, each sample once.

    unidist run --backend torch --nproc 2 examples/train.py --checkpoint out/digits
    unidist run --backend torch --nproc 3 examples/inference.py out/digits

The number of processes need not be the one that trained.
"""

import argparse

import numpy as np

import digits
import models
import unidist


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="what train.py --checkpoint wrote")
    parser.add_argument("--batch", type=int, default=64, help="samples on each device")
    parser.add_argument("--output", help="write the logits to this .npy file")
    parser.add_argument("--local-rank", "--local_rank", help=argparse.SUPPRESS)  # torch.distributed.launch adds it
    args = parser.parse_args()

    _, (images, labels) = digits.load()
    with unidist.Strategy() as strategy:
        zoo = models.load(strategy.framework)
        model = strategy.prepare(zoo.cnn(seed=0))
        strategy.load(args.checkpoint, model=model)
        logits = strategy.predict(model, strategy.loader(images, per_device_batch=args.batch))
        strategy.print(f"{len(logits)} digits, accuracy {(logits.argmax(axis=1) == labels).mean():.4f}")
        if args.output and strategy.is_main:
            np.save(args.output, logits)


if __name__ == "__main__":
    main()

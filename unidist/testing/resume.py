"""Training that stops in the middle of an epoch on one number of ranks and goes on on another; a job for `suite`."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import unidist
from unidist.testing import reference

SAMPLES, BATCH, STOP, STEPS = 90, 12, 11, 20  # eight steps make an epoch, the last one incomplete


def main(zoo_name: str, folder: str, part: str) -> None:
    with unidist.Strategy() as strategy:
        zoo = importlib.import_module(zoo_name)
        backend = strategy._backend
        net = zoo.mlp()
        backend.load_state(net, dict(zip(backend.state(net), reference.weights(), strict=True)))
        model, optimizer = strategy.prepare(net, unidist.SGD(lambda update: 0.5 / (1 + update), momentum=0.9))
        step = strategy.train_step(model, optimizer, zoo.cross_entropy)
        loader = strategy.loader(reference.data(SAMPLES), global_batch=BATCH, shuffle=True, seed=3)
        parts = {"model": model, "optimizer": optimizer, "loader": loader}
        losses: list[float] = []
        if part == "second":
            losses = strategy.load(Path(folder) / "checkpoint", **parts)["losses"]
        stop = STOP if part == "first" else STEPS
        while len(losses) < stop:
            for x, y in loader:
                losses.append(strategy.mean(step(x, y)))
                if len(losses) == stop:
                    break
        if part == "first":
            strategy.save(Path(folder) / "checkpoint", **parts, losses=losses)
        elif strategy.is_main:
            (Path(folder) / f"{part}.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The ranks of `unidist bench step`: hand-written loops of the backend against the same through unidist."""

from __future__ import annotations

import argparse
import importlib
import sys

from unidist import Strategy, registry
from unidist.bench.compare import compare, table


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    with Strategy() as strategy:
        module = registry.plugin(strategy.backend).bench
        assert module is not None
        contestants = importlib.import_module(module).contestants(strategy)

        def progress(text: str) -> None:
            if strategy.is_main and sys.stderr.isatty():
                print(f"\r{text}", end="", file=sys.stderr, flush=True)

        lines = compare(contestants, rounds=args.rounds, steps=args.steps, barrier=strategy.barrier, progress=progress)
        title = f"step, {strategy.backend}, {strategy.world_size} processes, {args.rounds} rounds of {args.steps} steps"
        strategy.print(table(lines, title))


if __name__ == "__main__":
    main()

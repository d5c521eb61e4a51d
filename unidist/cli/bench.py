"""`unidist bench`: what unidist costs, measured beside the same loop written by hand."""

from __future__ import annotations

import argparse

from unidist import registry
from unidist.errors import UsageError

BENCHMARKS = {
    "step": "a training step: hand-written loop against unidist, interleaved",
    "launch": "from the command to the first all-reduce: by hand or by the engine's own launcher, and `unidist run`",
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Measure both sides in one run, in turn, and print the ratio: below 1 unidist is faster."
    parser.epilog = "benchmarks:\n" + "\n".join(f"  {name:<8}{text}" for name, text in BENCHMARKS.items())
    add = parser.add_argument
    add("benchmark", choices=BENCHMARKS)
    add("-b", "--backend", default=registry.DEFAULT)
    add("-n", "--nproc", type=int, default=2)
    add("-o", "--option", action="append", default=[], metavar="K=V", help="an option of the backend")
    add("--rounds", type=int, help="how often each contestant runs (default: 41 for steps, 11 for launches)")
    add("--steps", type=int, default=50, help="steps in each run (default: 50)")


def run(args: argparse.Namespace) -> int:
    plugin = registry.plugin(args.backend)
    if args.rounds is None:
        args.rounds = 11 if args.benchmark == "launch" else 41
    if args.rounds < 2 or args.steps < 1 or args.nproc < 1:
        raise UsageError("a comparison needs --rounds of at least 2, --steps and --nproc of at least 1")
    if args.benchmark == "launch":
        from unidist.bench import launch

        launch.main(plugin, args.nproc, args.rounds, args.option)
        return 0
    if plugin.bench is None:
        raise UsageError(f"backend {args.backend!r} brings no hand-written loops to compare with")
    options = [f"--option={option}" for option in args.option]
    program = ["-m", f"unidist.bench.{args.benchmark}", f"--rounds={args.rounds}", f"--steps={args.steps}"]
    from unidist.cli import main

    return main(["run", "--quiet", f"--backend={args.backend}", f"--nproc={args.nproc}", *options, *program])

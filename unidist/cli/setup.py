"""`unidist setup`: build the environment of a framework, once."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time

from unidist.checks import did_you_mean
from unidist.errors import SetupError, UsageError
from unidist.setup import pythons, recipes, store

EXAMPLES = """\
examples:
  unidist setup torch            PyTorch; then: unidist run --backend torch --nproc 2 train.py
  unidist setup all              torch, mxnet, horovod (compiled: some minutes) and oneflow
  unidist setup --list           what is there, and where
  unidist setup torch --with transformers --with "datasets<4"     add packages; the recipe's own stay as they are
  unidist setup torch --python 3.12
  unidist setup oneflow --python ~/.pyenv/versions/3.10.13/bin/python

Environments are kept in $UNIDIST_HOME, else in the user's cache directory, and are found there by `unidist run`.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Build the environments that the frameworks need: pinned, cached and proven to work."
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help=f"{', '.join(recipes.names())}, or all (of the frameworks)")
    add("--list", action="store_true", help="show what is set up, and exit")
    add("--python", metavar="PATH", help="the interpreter to build with, or its version (default: one that fits)")
    add(
        "--with",
        dest="extra",
        action="append",
        default=[],
        metavar="PACKAGE",
        help="also install this package, as pip would, and again whenever the environment is rebuilt; may be repeated",
    )
    add(
        "--dir", metavar="D", help="keep environments in D instead; set UNIDIST_HOME=D so that `unidist run` finds them"
    )
    add(
        "--force",
        action="store_true",
        help="build again, though it is ready; the old one stays until the new one works",
    )
    add("-y", "--yes", action="store_true", help="where no Python fits and uv is there, let it fetch one")
    add("--prune", action="store_true", help="remove what older recipes have left there, and exit")
    add("--print-python", action="store_true", help="print only the path of the environment's interpreter at the end")


def run(args: argparse.Namespace) -> int:
    if args.dir:
        os.environ["UNIDIST_HOME"] = os.path.abspath(args.dir)
    if args.list:
        return _list()
    if args.prune:
        return _prune()
    known = recipes.names()
    names = [name for name in args.names if name != "all"]
    if "all" in args.names:
        names += [name for name in known if name not in ("dev", "docs")]
    if not names:
        raise UsageError(f"name what to set up: {', '.join(known)} or all; --list shows what is there")
    for name in names:
        if name not in known:
            recipes.check(name)
            hint = did_you_mean(name, [*known, "all"])
            raise UsageError(f"there is no recipe for {name!r}.{hint} Known: {', '.join(known)}")
    from unidist.setup import additions, build

    extra = [additions.requirement(text) for text in args.extra]
    # A kill is an interruption like any other: what was started is ended, nothing looks ready.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        signal.signal(signal.SIGHUP, lambda *_: sys.exit(129))
    begun, failed = time.monotonic(), False
    asked = [(recipe, [stage.name for stage in recipe.stages if stage.name in names]) for recipe in recipes.recipes()]
    refuse_what_has_no_python(asked, args.python, args.yes)
    for recipe, wanted in asked:
        if not wanted:
            continue
        try:
            environment = build.ensure(recipe, wanted, args.python, args.force, extra)
        except SetupError as error:  # the other environments have nothing to do with it
            failed = True
            print(f"unidist setup: {error}", file=sys.stderr)
            continue
        if args.print_python:
            print(environment.python)
        else:
            print(f"{', '.join(wanted)}: ready in {environment.path} ({time.monotonic() - begun:.1f} s)")
    return int(failed)


def refuse_what_has_no_python(
    asked: list[tuple[recipes.Recipe, list[str]]], python: str | None, may_fetch: bool = False
) -> None:
    """Before anything is built: some of it takes long. What may be fetched is fetched now."""
    problems, fine = [], []
    for recipe, wanted in asked:
        lacking = [name for name in wanted if store.find(recipe, name) is None]
        try:
            if lacking:
                _find_or_fetch(recipe.python, python, may_fetch)
            fine += wanted
        except SetupError as error:
            problems.append(f"{', '.join(lacking)}: {error}")
    if problems:
        rest = f"; `unidist setup {' '.join(fine)}` can be built with what is here" if fine else ""
        raise SetupError(f"{' '.join(problems)} (nothing was built{rest})")


def _find_or_fetch(versions: tuple[str, ...], given: str | None, may_fetch: bool) -> None:
    try:
        pythons.find(versions, given)
    except SetupError:
        missing = given or versions[0]
        if not (may_fetch and pythons.uv() and missing in versions):
            raise
        pythons.fetch(missing)
        pythons.find(versions, given)


def _list() -> int:
    for recipe in recipes.recipes():
        for stage in recipe.stages:
            environment = store.find(recipe, stage.name)
            pythons = "/".join(recipe.python)
            packages = ", ".join([*stage.packages, *([stage.build.requirement] if stage.build else [])])
            where = str(environment.path) if environment else f"not set up (Python {pythons}: {packages})"
            added = f" (added: {', '.join(environment.added)})" if environment and environment.added else ""
            print(f"{stage.name:<9} {where}{added}")
    return 0


def _prune() -> int:
    for path in store.outdated():
        print(f"removing {path}")
        store.remove(path)
    return 0

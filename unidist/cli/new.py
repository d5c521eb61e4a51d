"""`unidist new`: a training script to start from. A backend brings its own: `starter.py` beside its declaration."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import shlex
from pathlib import Path

from unidist import registry
from unidist.errors import UnidistError, UsageError
from unidist.launch import environments

EXAMPLES = """\
examples:
  unidist new train.py                         for the framework that `unidist run` would choose here
  unidist new --framework mxnet train.py
  unidist run --backend mxnet --nproc 2 train.py

The script trains on small made-up data as it stands; replace its data and its model by your own.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Write a training script to start from. A file that exists is never overwritten."
    parser.epilog = EXAMPLES
    parser.add_argument("-f", "--framework", metavar="NAME", help=", ".join(starters()))
    parser.add_argument("file", metavar="train.py", help="the file to write")


def run(args: argparse.Namespace) -> int:
    known = starters()
    name = args.framework or _usual(known)
    if name not in known:
        raise UsageError(f"there is no starter script for {name!r}.{_instead(name, known)}")
    file = Path(args.file)
    try:
        with open(file, "x") as new:
            new.write(known[name].read_text().replace("train.py", shlex.quote(file.name)))
    except FileExistsError:
        raise UsageError(f"{file} exists already, and is left as it is; name another file") from None
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from None
    command = f"{environments.command()} run --backend {name} --nproc 2 {shlex.quote(str(file))}"
    print(f"{file} is written. Run it: {command}")
    return 0


def starters() -> dict[str, Path]:
    """Backend -> its starter. No declaration is imported, at most the package that one is in."""
    found = {}
    for name, entry in sorted(registry.entries().items()):
        try:
            spec = importlib.util.find_spec(entry.module)
        except ImportError:  # of a package that is broken, or gone
            continue
        if spec and spec.origin and (path := Path(spec.origin).with_name("starter.py")).is_file():
            found[name] = path
    return found


def _instead(name: str, known: dict[str, Path]) -> str:
    """A backend for models of several frameworks says which by its option `framework`."""
    fitting = []
    for starter in known:
        with contextlib.suppress(UnidistError):
            registry.build_options(registry.plugin(name), {"framework": starter})
            fitting.append(starter)
    if not fitting:
        return f" There are starters for {', '.join(known)}."
    how = " or ".join(f"`--backend {name} --option framework={starter}`" for starter in fitting)
    return f" The starter of {' or '.join(fitting)} runs on it: write that one, and run it with {how}."


def _usual(known: dict[str, Path]) -> str:
    try:
        name = environments.choose(None)[0].name
    except UnidistError:  # none is set up, or several are
        name = registry.DEFAULT
    return name if name in known else registry.DEFAULT

"""`unidist python`: the interpreter of an environment that `unidist setup` made, used by hand."""

from __future__ import annotations

import argparse
import os

from unidist.launch import environments
from unidist.setup import recipes

EXAMPLES = """\
examples:
  unidist python torch                       PyTorch's interpreter, ready to be typed into
  unidist python torch script.py --epochs 3  one process, without a launcher
  unidist python torch -m pip list           what is installed there
  unidist python oneflow -c "import oneflow; print(oneflow.__version__)"

The environment finds this unidist and its backends. To add packages to it: unidist setup torch --with PACKAGE
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Run Python in the environment of a framework. Everything after the name is Python's."
    parser.epilog = EXAMPLES
    parser.usage = "unidist python NAME [arguments of python]"
    parser.add_argument("name", metavar="NAME", help=", ".join(recipes.names()))
    rest = parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="a script, -m MODULE, -c CODE and their arguments"
    )
    rest.required = False  # before Python 3.12, argparse says that it is when the name is missing


def run(args: argparse.Namespace) -> int:
    environment, variables = environments.by_hand(args.name)
    python = str(environment.python)
    os.execve(python, [python, *args.arguments], variables)

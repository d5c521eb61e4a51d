"""`unidist shell`: a shell in which `python` is that of an environment that `unidist setup` made."""

from __future__ import annotations

import argparse
import os
import shlex
import sys

from unidist.launch import environments
from unidist.setup import recipes

EXAMPLES = """\
examples:
  unidist shell torch                                 then: python, pip list, … ; `exit` or Ctrl-D leaves it
  echo "python -m pip list" | unidist shell torch     commands from elsewhere
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Start a shell with the environment of a framework first on PATH."
    parser.epilog = EXAMPLES
    parser.add_argument("name", metavar="NAME", help=", ".join(recipes.names()))


def run(args: argparse.Namespace) -> int:
    environment, variables = environments.by_hand(args.name)
    shell = variables.get("SHELL") or "/bin/sh"
    command = [shell]
    if os.path.basename(shell) == "bash" and sys.stdin.isatty():
        # The user's own start-up file may put other interpreters first on PATH, so ours comes after it.
        command += ["--rcfile", _after_bashrc(args.name, str(environment.python.parent))]
    if sys.stdin.isatty():
        print(f"{args.name}: {environment.path}; `exit` leaves this shell", file=sys.stderr, flush=True)
    os.execvpe(shell, command, variables)


def _after_bashrc(name: str, folder: str) -> str:
    """The path of a start-up file that nobody has to remove: a pipe that the shell inherits."""
    text = f'[ -f ~/.bashrc ] && . ~/.bashrc\nPATH={shlex.quote(folder)}:"$PATH"\nPS1="({name}) $PS1"\n'
    reader, writer = os.pipe()
    os.write(writer, text.encode())
    os.close(writer)
    os.set_inheritable(reader, True)
    return f"/dev/fd/{reader}"

"""The `unidist` command. Each sub-command is a module here with `configure(parser)` and `run(arguments) -> int`.

Only the module of the sub-command that was asked for is imported, so that `unidist run` starts at once.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from unidist.checks import did_you_mean
from unidist.errors import UnidistError, UsageError

COMMANDS = {
    "new": "write a training script to start from",
    "run": "start a script on N processes, show their output, end them together",
    "setup": "build the environment that a framework needs",
    "shell": "a shell in the environment of a framework",
    "python": "Python in the environment of a framework",
    "bench": "what unidist costs, measured beside the same loop written by hand",
    "backends": "which backends there are, what each can do, and why one cannot start here",
}

EXAMPLES = """\
examples:
  unidist setup torch                                   install PyTorch into its own environment, once
  unidist new --framework torch train.py                a script to start from
  unidist run --backend torch --nproc 2 train.py        train on two processes of this machine
  unidist run --nproc 4 --option bucket_cap_mb=50 train.py --epochs 3
  unidist run --dry-run --nproc 2 train.py              show what would be started
  unidist setup torch --with transformers               add a package to that environment
  unidist python torch -m pip list                      use it by hand
  unidist backends                                      what can run here

`unidist COMMAND --help` explains each. From a clone that is not installed: `python -m unidist COMMAND`.
"""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in COMMANDS:
        return _command(arguments[0], arguments[1:])
    top = argparse.ArgumentParser(
        prog="unidist",
        description="One training loop on PyTorch DDP, MXNet KVStore, OneFlow and Horovod.",
        epilog="commands:\n" + "".join(f"  {name:<10}{text}\n" for name, text in COMMANDS.items()) + "\n" + EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="unidist [--version] COMMAND …",
    )
    top.add_argument("--version", action="store_true", help="print the version and exit")
    top.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    known, _ = top.parse_known_args(arguments)
    if known.version:
        from unidist._version import __version__

        print(f"unidist {__version__}")
        return 0
    if known.command is not None:
        hint = did_you_mean(known.command, COMMANDS)
        top.error(f"there is no command {known.command!r}.{hint} Commands: {', '.join(COMMANDS)}")
    top.print_help(sys.stderr if arguments else sys.stdout)
    return 2 if arguments else 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """As argparse does it, and with the nearest right name for an option that is not known."""
        unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        near = difflib.get_close_matches(unknown[1], self._option_string_actions, n=1) if unknown else []
        super().error(message + (f". Did you mean {near[0]}?" if near else ""))


def _command(name: str, arguments: list[str]) -> int:
    try:
        module = importlib.import_module(f"unidist.cli.{name}")
        parser = _Parser(
            prog=f"unidist {name}", formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )
        module.configure(parser)
        code: int = module.run(parser.parse_args(arguments))
    except UnidistError as error:
        print(f"unidist {name}: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        print(f"unidist {name}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away, as in `unidist backends | head -1`
        return 141
    return code

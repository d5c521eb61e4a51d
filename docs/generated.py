"""The parts of the site that are made of the code: `::: api NAME` and `::: help COMMAND` in a page.

Not mkdocstrings, for two reasons. Our docstrings list arguments in aligned columns, which it would run together into
one paragraph. And importing unidist loads no framework, so what `inspect` sees is all that is needed.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WIDEST = 88  # characters of a signature in one line


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for each page."""
    sys.path[:0] = [str(ROOT), str(ROOT / "backends")]
    try:
        makers = {"api": api, "help": command_help}
        return re.sub(r"^::: (api|help) (\S+)$", lambda found: makers[found[1]](found[2]), markdown, flags=re.M)
    finally:
        del sys.path[:2]


def command_help(command: str) -> str:
    """What `unidist COMMAND --help` prints."""
    module = importlib.import_module(f"unidist.cli.{command}")
    parser = argparse.ArgumentParser(
        prog=f"unidist {command}",
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=100),
    )
    module.configure(parser)
    return f"```text\n{parser.format_help()}```\n"


def api(name: str) -> str:
    """A class with its public methods, or a function."""
    module, _, attribute = name.rpartition(".")
    found = getattr(importlib.import_module(module), attribute)
    if not inspect.isclass(found):
        return f"### {attribute}\n\n{_signature(attribute, found)}{_text(found)}"
    if dataclasses.is_dataclass(found):
        shown = [f"{field.name}{_default(field)}" for field in dataclasses.fields(found)]
        return f"### {attribute}\n\n{_code(attribute, shown)}{_text(found)}"
    parts = [f"## {attribute}\n"]
    if "__init__" in vars(found):
        parts.append(_signature(attribute, found.__init__))
    parts.append(_text(found))
    properties = {key: value for key, value in _public(found) if isinstance(value, property)}
    if properties:
        lines = [f"{key}: {value.fget.__annotations__['return']}{_remark(value)}" for key, value in properties.items()]
        parts.append("\n".join(["Properties:", "", "```python", *lines, "```"]) + "\n")
    for key, value in _public(found):
        if inspect.isfunction(value):
            parts.append(f"### {key}\n\n{_signature(key, inspect.unwrap(value))}{_text(value)}")
    return "\n".join(parts)


def _public(kind: type) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(kind).items() if not name.startswith("_")]


def _default(field: dataclasses.Field[Any]) -> str:
    return "" if field.default is dataclasses.MISSING else f"={field.default!r}"


def _signature(name: str, function: Any) -> str:
    """As it is written in the source, since annotations there are text."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    given = tree.args
    plain = given.posonlyargs + given.args
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(given.defaults)) + list(given.defaults)
    shown = [_argument(*each) for each in zip(plain, defaults, strict=True) if each[0].arg != "self"]
    if given.vararg:
        shown.append(f"*{_argument(given.vararg, None)}")
    elif given.kwonlyargs:
        shown.append("*")
    shown += [_argument(*each) for each in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    if given.kwarg:
        shown.append(f"**{_argument(given.kwarg, None)}")
    returns = f" -> {ast.unparse(tree.returns)}" if tree.returns and tree.name != "__init__" else ""
    return _code(name, shown, returns)


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    annotation = f": {ast.unparse(argument.annotation)}" if argument.annotation else ""
    equals = " = " if annotation else "="
    return argument.arg + annotation + (f"{equals}{ast.unparse(default)}" if default else "")


def _code(name: str, arguments: list[str], returns: str = "") -> str:
    line = f"{name}({', '.join(arguments)}){returns}"
    if len(line) > WIDEST:
        line = f"{name}(\n" + "".join(f"    {each},\n" for each in arguments) + f"){returns}"
    return f"```python\n{line}\n```\n\n"


def _remark(value: Any) -> str:
    said = (inspect.getdoc(value) or "").partition("\n")[0]
    return f"  # {said}" if said else ""


def _text(documented: Any) -> str:
    """The docstring as Markdown. Lines of the form `name   meaning` become a table."""
    lines, rows, done = (inspect.getdoc(documented) or "").splitlines(), [], []
    for line in [*lines, ""]:
        column = re.match(r"([\w, ]*\w) {2,}(\S.*)", line)
        if column and not line.startswith(" "):
            rows.append([column[1], column[2]])
        elif rows and line.startswith("  "):
            rows[-1][1] += f" {line.strip()}"
        else:
            if rows:
                done += [
                    "",
                    "| name | meaning |",
                    "| --- | --- |",
                    *(f"| `{name}` | {text} |" for name, text in rows),
                    "",
                ]
                rows = []
            done.append(line)
    return "\n".join(done) + "\n"

"""What is written in the README and in docs/: the blocks of code of each page, and what a reader is told about them.

A page may hold, in HTML comments that no reader sees,

    <!-- environment: mxnet -->   the framework in whose environment its Python blocks run, if it is not torch
    <!-- preamble                 Python that runs before the block that follows it, such as data and models
    ... -->

and above a block that the tests cannot run one visible line, `*Not run by the tests: REASON.*`
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from project import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_PART = re.compile(
    r"^<!-- preamble\n(?P<preamble>.*?)^-->"
    r"|^(?:\*Not run by the tests: (?P<reason>[^*]+)\.\*\n+)?^ *```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^ *```$",
    re.S | re.M,
)
_INCLUDED = re.compile(r'^ *--8<-- "([^":\n]+)(?::(\d+):)?"$', re.M)  # a file, or a file from some line on


@dataclass(frozen=True)
class Block:
    language: str  # "python" also for a preamble
    line: int  # of its first line in the page
    text: str
    not_run: str | None = None  # the reason


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for part in _PART.finditer(text):
        name = "text" if part["preamble"] is None else "preamble"
        body = _INCLUDED.sub(_included, part[name])
        line = text.count("\n", 0, part.start(name)) + 1
        language = "python" if name == "preamble" else part["language"]
        found.append(Block(language, line, body, part["reason"]))
    return found


def _included(named: re.Match[str]) -> str:
    lines = (ROOT / named[1]).read_text(encoding="utf-8").splitlines()
    return "\n".join(lines[int(named[2] or 1) - 1 :])


def environment(page: Path) -> str:
    named = re.search(r"^<!-- environment: (\w+) -->$", page.read_text(encoding="utf-8"), re.M)
    return named[1] if named else "torch"


def commands(page: Path) -> list[str]:
    """What a reader would type: the lines that begin with `$ `, with those that they are continued on."""
    found: list[str] = []
    for block in blocks(page):
        if block.language == "console" and block.not_run is None:
            joined = block.text.replace("\\\n", " ")
            found += [line.strip()[2:] for line in joined.splitlines() if line.strip().startswith("$ ")]
    return found

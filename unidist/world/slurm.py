"""Slurm's notations for hosts and numbers of tasks."""

from __future__ import annotations

import re

from unidist.errors import WorldError


def tasks_per_node(text: str) -> list[int]:
    """ "4,1(x2)" is [4, 1, 1]."""
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise WorldError(f"cannot read {text!r} as Slurm's tasks per node, such as 4,1(x2)")
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def expand_hostlist(text: str) -> list[str]:
    """ "h[0-2,5],g1" is h0, h1, h2, h5, g1; zeros in front are kept, and several brackets multiply."""
    hosts: list[str] = []
    for item in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text):
        names = [""]
        for literal, ranges in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", item):
            endings = [literal] if literal else _expand_ranges(ranges, text)
            names = [name + ending for name in names for ending in endings]
        hosts += names
    if not hosts or text.count("[") != text.count("]"):
        raise WorldError(f"cannot read {text!r} as Slurm's list of hosts, such as h[0-2,5],g1")
    return hosts


def _expand_ranges(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match is None:
            raise WorldError(f"cannot read {text!r} as Slurm's list of hosts, such as h[0-2,5],g1")
        first, last = match[1], match[2] or match[1]
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return numbers

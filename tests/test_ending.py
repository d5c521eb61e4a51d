"""A process that takes the short way out ends with the code that Python would have ended with."""

import subprocess
import sys

import pytest

from project import ROOT

SCRIPT = """
import sys
from unidist.control import ending

class Strategy:
    def __enter__(self): pass
    def __exit__(self, *_): ending.note_the_end()

def exits_and_stays():
    try:
        sys.exit(6)
    except SystemExit:
        pass

def train():
    with Strategy():
        {inside}

def main():
    try:
        train()
    except ValueError:
        {caught}

ending.offer(ending.Shortcut(lambda error: True, last=lambda code: print("told", code)))
"""
PLAIN = """
try:
    with Strategy():
        {inside}
except ValueError:
    {caught}
"""


@pytest.mark.parametrize(
    ("inside", "caught", "code"),
    [
        ("raise ValueError", "pass", 0),
        ("raise ValueError", "sys.exit()", 0),
        ("raise ValueError", "sys.exit(7)", 7),
        ("raise ValueError", "exits_and_stays()", 0),
        ("raise ValueError", "raise SystemExit(4)", 4),
        ("raise ValueError", "raise SystemExit('a text')", 1),
        ("raise ValueError", "raise KeyError('nobody catches it')", 1),
        ("raise ValueError", "raise KeyboardInterrupt", 130),
        ("raise ValueError", "sys.settrace(None); raise", 1),  # as debuggers do when they are left
        ("sys.exit(3)", "pass", 3),
        ("raise KeyError('nobody catches it')", "pass", 1),
    ],
)
@pytest.mark.parametrize("end", ["main()\n", PLAIN], ids=["function", "plain"])
@pytest.mark.parametrize("how", ["script", "module"])
def test_the_exit_code_is_pythons(tmp_path, how, end, inside, caught, code):
    (tmp_path / "train.py").write_text((SCRIPT + end).format(inside=inside, caught=caught))
    command = [sys.executable, *(["-m", "train"] if how == "module" else [str(tmp_path / "train.py")])]
    path = f"{ROOT}:{tmp_path}"
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={"PYTHONPATH": path})
    assert done.returncode == code, done.stderr
    assert done.stdout == f"told {code}\n"

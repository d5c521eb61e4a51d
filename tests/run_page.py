"""Runs the Python blocks of a page, as cells of one notebook: `python run_page.py < blocks.json`.

A block is [line, text]. Tracebacks show the lines of the page. There is no `__file__`, as in a notebook, so that
functions of the page travel to other processes by value.
"""

import json
import linecache
import sys

page, blocks = json.load(sys.stdin)
lines = [""] * 10_000
for line, text in blocks:
    lines[line - 1 : line - 1 + len(text.splitlines())] = [each + "\n" for each in text.splitlines()]
linecache.cache[page] = (0, None, lines, page)
del __file__
sys.path[0] = ""  # the folder that the page runs in, as in a notebook
for line, text in blocks:
    exec(compile("\n" * (line - 1) + text, page, "exec"), globals())

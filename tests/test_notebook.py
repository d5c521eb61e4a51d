"""examples/notebook.ipynb, cell by cell in a process that looks to `unidist.launch` as a notebook's kernel does.

No Jupyter: what a kernel has that matters here is a `__main__` without a file, and a `sys.stdout` that is not file 1.
Both are made below in a few lines, and save some thirty packages in the environment of the tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

from launch_support import PATIENCE, Place
from project import ROOT
from unidist.launch.environments import interpreter_for

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
KERNEL = """
import io, json, sys, types
cells = json.load(sys.stdin)
main = sys.modules["__main__"] = types.ModuleType("__main__")
screen, sys.stdout = sys.stdout, io.StringIO()
for number, source in enumerate(cells):
    exec(compile(source, f"<cell {number}>", "exec"), main.__dict__)
    print("-- end of cell")
screen.write(sys.stdout.getvalue())
"""


def run_cells(python: str, env: dict[str, str], cells: list[str]) -> subprocess.CompletedProcess[str]:
    command = [python, "-c", KERNEL]
    return subprocess.run(
        command, input=json.dumps(cells), env=env, capture_output=True, text=True, timeout=2 * PATIENCE
    )


def test_the_notebook_runs_from_top_to_bottom() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code")
    python, variables = interpreter_for("torch")
    ended = run_cells(python, {**os.environ, **variables}, cells)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    _, _, trained, compared, failed, _ = ended.stdout.split("-- end of cell\n")
    assert trained.count("[worker 0] epoch ") == 5, trained
    assert "ranks agree: True  as on one process: True" in compared
    assert "worker 1 on " in failed
    assert "ValueError: something is wrong on rank 1" in failed


# -- where a function may come from ----------------------------------------------------------------------------------

TYPED = """
    import sys
    from unidist.errors import LaunchError
    from unidist.launch.inline import launch
    def typed(x): return x + 1
    try:
        print(launch(typed, 2, "plain", (1,)), launch(lambda: 7, 2, "plain"))
    except LaunchError as error:
        print(error)
"""


def from_stdin(place: Place, program: str, **env: str) -> subprocess.CompletedProcess[str]:
    env = {**place.env, **env}
    return subprocess.run(
        [sys.executable, "-"], input=program, env=env, cwd=place.path, capture_output=True, text=True, timeout=PATIENCE
    )


def test_functions_of_a_program_that_came_from_stdin(place: Place) -> None:
    ended = from_stdin(place, textwrap.dedent(TYPED))
    assert ended.stdout == "[2, 2] [7, 7]\n", ended.stderr


def test_without_cloudpickle_they_are_refused(place: Place) -> None:
    ended = from_stdin(place, "import sys\nsys.modules['cloudpickle'] = None\n" + textwrap.dedent(TYPED))
    assert "typed cannot be found by name from another process" in ended.stdout, ended.stderr
    assert "install cloudpickle" in ended.stdout


def test_code_of_another_python_is_refused(place: Place) -> None:
    """A function by value is bytecode, which another Python may run wrongly or die of."""
    program = "import sys\nfrom unidist.launch import carry\ncarry.PYTHON = '3.99'\n" + textwrap.dedent(TYPED)
    ended = from_stdin(place, program)
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert f"comes from Python 3.99, and {sys.executable} is Python {here}" in ended.stdout, ended.stderr
    assert ended.stderr == ""  # said before a process was started, which would have shown a traceback
    assert "into a file" in ended.stdout

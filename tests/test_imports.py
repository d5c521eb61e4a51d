"""Who may import whom, and what `import unidist` costs."""

import ast
import subprocess
import sys

import pytest

import unidist
from project import ROOT

FRAMEWORKS = {"torch", "mxnet", "oneflow", "horovod"}
BACKENDS = {path.name for path in (ROOT / "backends").iterdir() if path.name.startswith("unidist_")}
MAY_BUILD_ON = {"unidist_horovod": {"unidist_torch", "unidist_mxnet"}}


def imported(path) -> set[str]:
    """Top-level names that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def test_the_core_imports_no_framework_and_no_backend():
    for path in (ROOT / "unidist").rglob("*.py"):
        if path.parent.name == "probes":
            continue  # scripts that `unidist setup` runs inside the new environment
        assert not imported(path) & (FRAMEWORKS | BACKENDS), path


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_backends_do_not_import_each_other(backend):
    others = BACKENDS - {backend} - MAY_BUILD_ON.get(backend, set())
    for path in (ROOT / "backends" / backend).rglob("*.py"):
        assert not imported(path) & others, path


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_declaring_a_backend_imports_no_framework(backend):
    name = backend.removeprefix("unidist_")
    loaded_by(f"from unidist import registry; registry.plugin({name!r})", FRAMEWORKS)


def test_import_unidist_loads_no_framework_and_no_numpy():
    loaded_by("import unidist", FRAMEWORKS | {"numpy", "http", "safetensors"})


def test_the_launcher_loads_no_framework_and_no_numpy():
    loaded_by("import unidist.cli, unidist.launch.engine", FRAMEWORKS | {"numpy"})


def loaded_by(code: str, unwanted: set[str]) -> None:
    program = f"{code}\nimport sys\nprint(sorted({unwanted!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_every_public_name_is_there():
    assert all(hasattr(unidist, name) for name in unidist.__all__)

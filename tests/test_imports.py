"""Who may import whom, and what `import unidist` costs."""

import ast
import subprocess
import sys

import pytest

import unidist
import unidist.plugin
from project import ROOT
from unidist.control.host import PROGRAM

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
        assert not imported(path) & (FRAMEWORKS | BACKENDS), path


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_backends_do_not_import_each_other(backend):
    others = BACKENDS - {backend} - MAY_BUILD_ON.get(backend, set())
    for path in (ROOT / "backends" / backend).rglob("*.py"):
        assert not imported(path) & others, path


@pytest.mark.parametrize("folder", [*(f"backends/{name}" for name in sorted(BACKENDS)), "examples/plugin"])
def test_backends_import_nothing_of_the_core_but_what_is_declared(folder):
    """`import unidist` is for their benchmarks, which are programs such as users write."""
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not [alias.name for alias in node.names if alias.name.startswith("unidist.")], path
            elif isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "unidist":
                assert node.module == "unidist.plugin", f"{path}:{node.lineno} imports {node.module}"
                assert {alias.name for alias in node.names} <= set(unidist.plugin.__all__), path


def test_what_plug_ins_may_import_is_sorted_and_there():
    declared = unidist.plugin.__all__
    assert declared == sorted(declared, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    assert len(declared) == len(set(declared))
    for name in declared:
        getattr(unidist.plugin, name)
    with pytest.raises(AttributeError, match="no_such_name"):
        unidist.plugin.no_such_name  # noqa: B018
    public = {name for name in vars(unidist.plugin) if not name.startswith("_")}
    assert public - {"annotations", "importlib", "Any", "TYPE_CHECKING"} <= set(declared)


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_declaring_a_backend_imports_no_framework(backend):
    name = backend.removeprefix("unidist_")
    loaded_by(f"from unidist import registry; registry.plugin({name!r})", FRAMEWORKS | {"numpy"})


def test_import_unidist_loads_no_framework_and_no_numpy():
    loaded_by("import unidist", FRAMEWORKS | {"numpy", "http", "safetensors"})


def test_the_launcher_loads_no_framework_and_no_numpy():
    loaded_by("import unidist.cli, unidist.launch.engine", FRAMEWORKS | {"numpy"})


def test_the_server_beside_rank_0_loads_what_it_needs():
    """All ranks wait for it. With these, its start would take twice as long."""
    code = PROGRAM.format(folder=str(ROOT / "unidist")).replace("main()", "")
    loaded_by(code, {"dataclasses", "inspect", "pathlib", "subprocess", "random", "urllib", "numpy"}, "-I", "-S")


def loaded_by(code: str, unwanted: set[str], *flags: str) -> None:
    program = f"{code}\nimport sys\nprint(sorted({unwanted!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, *flags, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.parametrize(
    "code",
    [
        "import unidist.launch.plan; found = unidist.launch.plan",
        "import unidist.launch.plan as found",
        "from unidist.launch import plan as found",
        "import unidist.launch; from unidist.launch.plan import Job; import unidist; found = unidist.launch.plan",
    ],
)
def test_launch_is_a_package_and_a_function(code):
    program = (
        f"{code}\nassert found.__name__ == 'unidist.launch.plan', found\n"
        "import inspect, pickle, sys, unidist\n"
        "assert unidist.launch is sys.modules['unidist.launch']\n"
        "assert list(inspect.signature(unidist.launch).parameters)[:3] == ['fn', 'nproc', 'backend']\n"
        "assert pickle.loads(pickle.dumps(unidist.launch)) is unidist.launch\n"
        "try: unidist.launch(print, nproc=0)\n"
        "except unidist.UnidistError as error: assert 'nproc is 0' in str(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_there():
    assert all(hasattr(unidist, name) for name in unidist.__all__)

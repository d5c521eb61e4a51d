"""Carries a function and its arguments to the processes of a job, and their results back, through a directory.

Run as a program it is the other end: `python -m unidist.launch.carry DIRECTORY`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import pickle
import runpy
import sys
import sysconfig
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unidist.errors import LaunchError
from unidist.launch import inline

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
MAIN = "__unidist_main__"  # the caller's script, when it is loaded for its functions only
RETURN = "return numbers, strings, numpy arrays, or lists, tuples and dicts of them"


def pack(fn: Callable[..., Any], args: tuple[Any, ...], directory: Path, python: str) -> None:
    """Put a call where the processes of the interpreter `python` will find it."""
    main = sys.modules["__main__"]
    script = getattr(main, "__file__", None)
    if script is not None and not os.path.isfile(script):  # "<stdin>"
        script = None
    in_notebook = getattr(fn, "__module__", None) == "__main__" and script is None
    call: bytes | None = None
    if not in_notebook:
        with contextlib.suppress(pickle.PicklingError, AttributeError, TypeError):  # a lambda or a closure
            call = pickle.dumps((fn, args))
    if call is None:
        _refuse_another_python(python)
        call = _by_value(fn, args)
    if b"__main__" not in call:  # then the script need not be loaded there
        script = None
    (directory / "call.pickle").write_bytes(call)
    installed = tuple(sysconfig.get_paths().values())
    context = {
        "script": os.path.abspath(script) if script and main.__spec__ is None else None,
        "module": main.__spec__.name if script and main.__spec__ is not None else None,
        # What is importable here beside what is installed, which the other interpreter may have in other versions.
        "path": [os.path.abspath(p) for p in sys.path if not os.path.abspath(p).startswith(installed)],
    }
    (directory / "context.json").write_text(json.dumps(context))


def _refuse_another_python(python: str) -> None:
    """By value a function is bytecode, which another Python runs wrongly or dies of."""
    from unidist.launch import environments  # not needed at the other end

    there = environments.version_of(python)
    if there != PYTHON:
        raise LaunchError(
            f"the function comes from Python {PYTHON}, and {python} is Python {there}. Put the function into a file of "
            "its own and import it from there, or use the same Python for both."
        )


def _by_value(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    name = getattr(fn, "__qualname__", repr(fn))
    if importlib.util.find_spec("cloudpickle") is None:
        raise LaunchError(
            f"{name} cannot be found by name from another process. Put it at the top level of a module or script, "
            "or install cloudpickle."
        )
    try:
        data: bytes = importlib.import_module("cloudpickle").dumps((fn, args))
    except Exception as error:  # whatever a user's object raises
        raise LaunchError(f"{name} and its arguments cannot be sent to another process: {error}") from error
    return data


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return super().find_class("__main__" if module == MAIN else module, name)


def result(directory: Path, rank: int) -> Any:
    with contextlib.suppress(FileNotFoundError):
        raise LaunchError((directory / f"refused-{rank}.txt").read_text())
    try:
        with open(directory / f"result-{rank}.pickle", "rb") as file:
            return _Unpickler(file).load()
    except FileNotFoundError:
        raise LaunchError(f"worker {rank} ended well, but before the function returned") from None
    except Exception as error:  # of a class that is not here, or whatever a user's object raises
        raise LaunchError(f"the result of worker {rank} cannot be read here ({error}): {RETURN}") from error


def main(directory: Path) -> None:
    context = json.loads((directory / "context.json").read_text())
    sys.path[0:1] = context["path"]  # in place of the directory we were started in
    if context["script"] or context["module"]:
        # As multiprocessing does: the script's functions and classes are to be found in __main__.
        load, what = (runpy.run_path, context["script"]) if context["script"] else (runpy.run_module, context["module"])
        module = types.ModuleType(MAIN)
        inline.loading = True
        module.__dict__.update(load(what, run_name=MAIN))
        inline.loading = False
        sys.modules["__main__"] = sys.modules[MAIN] = module
    fn, args = pickle.loads((directory / "call.pickle").read_bytes())
    value = fn(*args)
    rank = os.environ["UNIDIST_RANK"]
    try:
        data = pickle.dumps(value)
    except Exception as error:  # whatever a user's object raises. The caller says it, once and without our own frames.
        name = getattr(fn, "__qualname__", repr(fn))
        refusal = f"the result of {name} cannot be sent back: {RETURN} ({type(error).__name__}: {error})"
        (directory / f"refused-{rank}.txt").write_text(refusal)
        return
    aside = directory / f"result-{rank}.aside"
    aside.write_bytes(data)
    aside.rename(directory / f"result-{rank}.pickle")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

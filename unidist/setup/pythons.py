"""Finds an interpreter of a given version that really runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from unidist.errors import SetupError

_ASK = "import sys, venv, ensurepip; print('%d.%d.%d' % sys.version_info[:3], sys.executable)"


def find(versions: tuple[str, ...], given: str | None = None) -> tuple[str, str]:
    """(path, full version) of an interpreter whose "3.x" is in `versions`, the first of them preferred."""
    if given is not None and re.fullmatch(r"\d\.\d+", given):
        if given not in versions:
            raise SetupError(f"--python {given}: this needs Python {' or '.join(versions)}")
        versions, given = (given,), None
    if given is not None:
        path = shutil.which(given) or given
        answer = ask(path)
        if answer is None:
            raise SetupError(
                f"--python {given}: it does not run, or has no venv and ensurepip modules; this needs Python "
                f"{' or '.join(versions)}"
            )
        if short(answer[1]) not in versions:
            raise SetupError(f"--python {given} is Python {answer[1]}; this needs Python {' or '.join(versions)}")
        return answer
    for version in versions:
        for path in [*([sys.executable] if version == current() else []), *candidates(version)]:
            answer = ask(path)
            if answer and short(answer[1]) == version:
                return answer
    wanted = " or ".join(f"Python {version}" for version in versions)
    example = versions[0]
    offer = (
        f"Let uv fetch one (add --yes: `uv python install {example}`), install one yourself "
        if uv()
        else "Install one "
    )
    raise SetupError(
        f"{wanted} is needed, and none was found on PATH, under pyenv, uv or conda. {offer}"
        f"(`pyenv install {example}`, `uv python install {example}`, `conda create -n py{example} python={example}`, "
        f"or your system's python{example} with its venv package), or name one: --python PATH"
    )


# uv fetches Pythons, which pip cannot. The packages stay with pip, though uv was much faster (12 packages in 5 s, after
# pip had taken 4 min for them, once each on a busy machine): uv reads none of pip's settings. On a machine whose pip
# finds torch's CPU build in a find-links folder, uv resolved the same 17 versions when it was told that folder and each
# further index by hand; alone it takes the CUDA build. The environment itself is made by venv, because its pip comes
# with the Python and not from an index.


def uv() -> str | None:
    return shutil.which("uv")


def fetch(version: str) -> None:
    """Have uv install a Python for this user, which the user has agreed to."""
    command = ["uv", "python", "install", version]
    print(f"Python {version} is missing and is fetched now: {' '.join(command)}", file=sys.stderr, flush=True)
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    if ended.returncode != 0:
        raise SetupError(f"`{' '.join(command)}` failed (exit code {ended.returncode}); what it says is above")


def candidates(version: str) -> Iterator[str]:
    """Paths that may be a Python of this version, the likeliest first."""
    for directory in os.get_exec_path():
        path = os.path.join(directory, f"python{version}")
        if os.access(path, os.X_OK):
            yield path
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share")
    roots = [
        Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions",
        Path(os.environ.get("UV_PYTHON_INSTALL_DIR") or data / "uv/python"),
        *(Path(os.environ[name]).parent for name in ("CONDA_PREFIX",) if os.environ.get(name)),
        *(Path.home() / name / "envs" for name in ("miniconda3", "anaconda3", "miniforge3", "mambaforge", ".conda")),
    ]
    for root in roots:
        yield from sorted(map(str, root.glob(f"*/bin/python{version}")), reverse=True)
    for directory in os.get_exec_path():  # a plain python3 may be the right one
        path = os.path.join(directory, "python3")
        if os.access(path, os.X_OK):
            yield path


def ask(path: str) -> tuple[str, str] | None:
    """(real path, version) when it runs and can make environments: a pyenv shim may not do the first, a distribution's
    python without its venv package not the second."""
    try:
        answer = subprocess.run(
            [path, "-I", "-c", _ASK], capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if answer.returncode != 0:
        return None
    version, _, executable = answer.stdout.strip().partition(" ")
    return executable, version


def current() -> str:
    return f"{sys.version_info[0]}.{sys.version_info[1]}"


def short(version: str) -> str:
    return version.rpartition(".")[0]

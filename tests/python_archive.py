"""A Python that the real uv fetches without a network: the running one, packed as python-build-standalone packs them.

uv's own mirror setting cannot be used: uv knows the hashes of the archives that belong there. It takes a list of
downloads in their place, whose archives may be files.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import sysconfig
import tarfile
from pathlib import Path

from setup_support import PYTHON

# The archive must hold what runs a script and makes an environment. The rest is most of a Python's size.
LEFT_OUT = {"__pycache__", "dist-packages", "idlelib", "lib2to3", "pydoc_data", "site-packages", "test", "tests"}


def pack(folder: Path) -> Path:
    archive = folder / f"cpython-{platform.python_version()}-install_only.tar.gz"
    with tarfile.open(archive, "w:gz", compresslevel=0) as packed:  # packing takes three times as long with level 1
        interpreter = os.path.realpath(f"{sys.base_prefix}/bin/python{PYTHON}")  # that of the tests is a link to it
        packed.add(interpreter, f"python/bin/python{PYTHON}")
        packed.add(sysconfig.get_path("stdlib"), f"python/lib/python{PYTHON}", filter=_needed)
        if sysconfig.get_config_var("Py_ENABLE_SHARED"):
            library = Path(sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("INSTSONAME"))
            packed.add(library, f"python/lib/{library.name}")
    return archive


def _needed(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    name = os.path.basename(member.name)
    return None if name in LEFT_OUT or name.startswith("config-") else member


def offer(archive: Path, folder: Path, sha256: str | None = None) -> str:
    """The address of a list, for UV_PYTHON_DOWNLOADS_JSON_URL, that has this archive only; with its hash, or another
    one."""
    machine = platform.machine()
    download = {
        "name": "cpython",
        "arch": {"family": machine, "variant": None},
        "os": "linux",
        "libc": "gnu",
        "major": sys.version_info.major,
        "minor": sys.version_info.minor,
        "patch": sys.version_info.micro,
        "prerelease": "",
        "url": archive.as_uri(),
        "sha256": sha256 or hashlib.sha256(archive.read_bytes()).hexdigest(),
        "variant": None,
    }
    file = folder / "downloads.json"
    file.write_text(json.dumps({f"cpython-{platform.python_version()}-linux-{machine}-gnu": download}))
    return file.as_uri()

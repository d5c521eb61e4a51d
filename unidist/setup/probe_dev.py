"""The development tools start. Run by `unidist setup`."""

import importlib
import subprocess
import sys

for name in ("numpy", "pytest", "hypothesis"):
    importlib.import_module(name)
for name in ("ruff", "mypy", "build", "uv"):
    subprocess.run([sys.executable, "-m", name, "--version"], check=True)

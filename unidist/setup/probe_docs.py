"""What builds the site can be imported. Run by `unidist setup`."""

import importlib
import subprocess
import sys

importlib.import_module("material")
subprocess.run([sys.executable, "-m", "mkdocs", "--version"], check=True)

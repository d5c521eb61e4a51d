"""The core's tests on other Pythons: `python tests/on_pythons.py FOLDER 3.10 3.12`, environments in FOLDER.

A Python that is not on this machine is named and passed over; one that is there and fails makes this fail. Only tests
that need no framework and start few processes: 26 s of one core for each Python, once its environment is built.
"""

from __future__ import annotations

import subprocess
import sys

from project import ROOT

sys.path.insert(0, str(ROOT))

from unidist.errors import SetupError
from unidist.setup import pythons

TESTS = [
    "imports",
    "registry",
    "world",
    "world_arguments",
    "plan",
    "data",
    "roll",
    "roll_calls",
    "pace",
    "training",
    "control",
    "control_gather",
    "control_heart",
    "checkpoint",
    "checkpoint_not_whole",
    "checkpoint_disk",
    "checkpoint_names",
    "output_progress",
    "output_logs",
    "output_metrics",
    "cli",
]


def main(folder: str, versions: list[str]) -> int:
    failed = []
    for version in versions:
        try:
            pythons.find((version,))
        except SetupError:
            print(f"Python {version} is not on this machine: not tested", flush=True)
            continue
        setup = [sys.executable, "-m", "unidist", "setup", "dev", "--python", version, "--dir", folder]
        built = subprocess.run([*setup, "--print-python"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        tests = [f"tests/test_{name}.py" for name in TESTS]
        command = [built.stdout.strip(), "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
        print(f"Python {version}:", flush=True)
        if built.returncode != 0 or subprocess.run(command, cwd=ROOT).returncode != 0:
            failed.append(version)
    if failed:
        print(f"failed on Python {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))

"""Starting examples/train.py in the ways of its users, and what it prints."""

import re
import subprocess

import pytest

from project import ROOT

TIMEOUT = 300

# The losses of five epochs on torch.
OF_TORCH = [2.207328, 1.045128, 0.490391, 0.332328, 0.267501]


def start(command: list[str], env: dict[str, str]) -> subprocess.Popen:
    return subprocess.Popen(
        command,
        env=env,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(*processes: subprocess.Popen) -> str:
    """What they printed, after a good end."""
    output = ""
    for process in processes:
        try:
            output += process.communicate(timeout=TIMEOUT)[0]
        except subprocess.TimeoutExpired:
            for each in processes:
                each.kill()
            pytest.fail(f"still running after {TIMEOUT} s:\n{process.communicate()[0]}")
    assert not any(process.returncode for process in processes), output
    return output


def curve(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"epoch \d+  loss (\S+)", output)]

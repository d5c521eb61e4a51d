"""A reader sees the old checkpoint or the new one, whatever another process saves meanwhile."""

import subprocess
import sys
import textwrap
import warnings

import pytest

from unidist.checkpoint import latest, read

# Saves as fast as it can, until its input is closed.
WRITER = textwrap.dedent(
    """
    import os, sys, threading
    import numpy as np
    from unidist.checkpoint import write

    folder, keep = sys.argv[1], int(sys.argv[2])
    os.fsync = lambda handle: None  # it would leave the moments between the steps of a save too rare
    done = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), done.set()), daemon=True).start()
    n = 0
    while not done.is_set():
        n += 1
        arrays = {"model/w": np.full(2_000, n), "optimizer/v": np.full(1_000, n, np.float32)}
        write(folder, arrays, {"n": n, "nan": float("nan")}, **({"step": n, "keep": keep} if keep else {}))
        if n == 1:
            print("ready", flush=True)
    print(n)
    """
)


@pytest.mark.parametrize("keep", [0, 1, 2])
def test_reading_while_another_process_saves(tmp_path, keep):
    folder = tmp_path / "c"
    command = [sys.executable, "-c", WRITER, str(folder), str(keep)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout.readline() == "ready\n"
        seen = []
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # none is passed over as damaged
            for _ in range(400):
                found = read(folder)
                n = found.values["n"]
                assert (found.arrays["model/w"] == n).all()
                assert (found.arrays["optimizer/v"] == n).all()
                seen.append(n)
                assert latest(folder) is not None
        last = int(writer.communicate(timeout=60)[0])
    assert writer.returncode == 0
    assert seen == sorted(seen)  # never back to an older one
    assert len(set(seen)) > 20, "it did not save meanwhile"
    assert last >= seen[-1]

"""A writer that is killed leaves the old checkpoint or the new one, and the next save leaves nothing else."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from unidist.checkpoint import latest, read, write

# Forks a writer for each kill: a fresh interpreter for each would take most of the time to import numpy.
DRIVER = textwrap.dedent(
    """
    import json, os, random, signal, sys, time
    import numpy as np
    from unidist.checkpoint import read, write

    folder, kills, numbered = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "numbered"

    def save(n):
        arrays = {"model/w": np.full(60_000, n, np.int64), "optimizer/v": np.full(30_000, n, np.float32)}
        return write(folder, arrays, {"n": n, "text": str(n) * 100}, **({"step": n, "keep": 2} if numbered else {}))

    def state():
        got = read(folder)
        n = got.values["n"]
        assert got.values["text"] == str(n) * 100
        assert (got.arrays["model/w"] == n).all() and (got.arrays["optimizer/v"] == n).all()
        return n

    took = []
    for n in range(5):
        begin = time.monotonic()
        save(n)
        took.append(time.monotonic() - begin)
    longest, old, counts = max(took[1:]), n, {"old": 0, "new": 0, "killed": 0}
    dice = random.Random(1)
    for n in range(5, 5 + kills):
        writer = os.fork()
        if not writer:
            save(n)
            os._exit(0)
        time.sleep(dice.uniform(0, 1.2 * longest))
        os.kill(writer, signal.SIGKILL)
        counts["killed"] += os.WIFSIGNALED(os.waitpid(writer, 0)[1])
        found = state()
        assert found in (old, n), (found, old, n)
        counts["new" if found == n else "old"] += 1
        old = found
    save(n + 1)
    assert state() == n + 1
    print(json.dumps(counts))
    """
)


@pytest.mark.parametrize("layout", ["single", "numbered"])
def test_killed_at_random_moments(tmp_path, layout):
    kills = 200 if layout == "single" else 60
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(tmp_path / "c"), str(kills), layout],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert counts["old"] + counts["new"] == kills
    assert counts["old"] > kills // 20  # else the moments missed the save
    assert counts["killed"] > kills // 20
    leftovers = [path for path in (tmp_path / "c").rglob("*") if path.is_file()]
    assert len(leftovers) == (3 if layout == "single" else 6)


def killed_at(line: int, save) -> bool:
    """Run `save` in a fork that kills itself before the given line of the writer; True if it got that far."""
    writer = os.fork()
    if not writer:
        left = line

        def trace(frame, event, _):
            nonlocal left
            if not frame.f_code.co_filename.endswith(("checkpoint/writer.py", "checkpoint/arrays.py")):
                return None  # the others do not touch the disk
            if event == "line":
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)
        save()
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(writer, 0)[1])


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # forks beside the threads of a BLAS
def test_killed_before_each_line_of_a_save(tmp_path, monkeypatch):
    """The first save, a replacing one and one that removes older ones, killed before every line that they run."""
    monkeypatch.setattr(os, "fsync", lambda _: None)  # slow, and it matters to a power cut only, not to a kill

    def arrays(n):
        return {"model/w": np.full(3, n)}

    def check(folder, allowed):
        for index in folder.rglob("checkpoint.json"):
            read(index.parent)  # none is there by half, the older ones neither
        found = latest(folder)
        got = None if found is None else read(found)
        n = None if got is None else got.values["n"]
        assert n in allowed
        assert got is None or (got.arrays["model/w"] == n).all()
        return n

    seen = set()
    for kind in ("first", "replace", "numbered"):
        folder = tmp_path / kind
        how = {"step": 3, "keep": 2} if kind == "numbered" else {}
        line = 0
        while True:
            old = None
            if kind != "first":
                old = 2
                for n in (1, 2):
                    write(folder, arrays(n), {"n": n}, **({"step": n} if how else {}))
            was_killed = killed_at(line, lambda: write(folder, arrays(3), {"n": 3}, **how))  # noqa: B023
            seen.add((kind, check(folder, (old, 3)), was_killed))
            write(folder, arrays(3), {"n": 3}, **how)
            assert check(folder, (3,)) == 3
            assert len([path for path in folder.rglob("*") if path.is_file()]) == (4 if how else 2)
            for path in sorted(folder.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            folder.rmdir()
            if not was_killed:
                break
            line += 1
        assert line > 80
    for kind, old in (("first", None), ("replace", 2), ("numbered", 2)):
        assert {(kind, old, True), (kind, 3, True), (kind, 3, False)} <= seen

"""Saving to a disk that does not take it, and beside others that write or read at the same time."""

import os
import resource
import warnings
from pathlib import Path

import numpy as np
import pytest

from checkpoint_support import ARRAYS, files, same
from unidist.checkpoint import read, write
from unidist.errors import CheckpointError


def test_a_path_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "final"):
        with pytest.raises(CheckpointError, match="cannot save to"):
            write(path, ARRAYS)
        with pytest.raises(CheckpointError, match=r"not a whole safetensors|no checkpoint"):
            read(path)


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path):
    """The limit on the size of a file stands in for a full disk: it fails in the middle of a write."""
    write(tmp_path, ARRAYS, {"n": 1})
    before = files(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (0, 100, 50_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
        try:
            with pytest.raises(CheckpointError, match=r"cannot save to .*File too large.*before is unchanged"):
                write(tmp_path, {"model/big": np.zeros(100_000)}, {"n": 2})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert files(tmp_path) == before
        assert read(tmp_path).values == {"n": 1}


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_any_failing_call_leaves_the_old_checkpoint(tmp_path, monkeypatch, call):
    write(tmp_path, ARRAYS, {"n": 1})
    before = files(tmp_path)

    def fail(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(CheckpointError, match="No space left on device"):
            write(tmp_path, ARRAYS, {"n": 2})
    assert files(tmp_path) == before
    assert read(tmp_path).values == {"n": 1}


def test_two_writers_at_once(tmp_path):
    """The second is told, instead of removing the files of the first."""
    import fcntl

    write(tmp_path, ARRAYS)
    handle = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        with pytest.raises(CheckpointError, match="another process is saving"):
            write(tmp_path, ARRAYS)
    finally:
        os.close(handle)
    write(tmp_path, ARRAYS)


def test_a_save_while_reading(tmp_path, monkeypatch):
    """The files vanish between the index and the arrays: the reader takes the new ones."""
    from unidist.checkpoint import arrays

    write(tmp_path, ARRAYS, {"n": 1})
    load, calls = arrays.load, []

    def slow(*how):
        if not calls:
            calls.append(1)
            write(tmp_path, ARRAYS, {"n": 2})
        return load(*how)

    monkeypatch.setattr(arrays, "load", slow)
    got = read(tmp_path)
    same(got)
    assert got.values == {"n": 2}


def test_nothing_is_synced_too_late(tmp_path, monkeypatch):
    """Each file before the index that names it, and the index before its predecessor's files go."""
    calls = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)

        def spy(*how, name=name, real=real):
            calls.append(name if name == "replace" else Path(os.readlink(f"/proc/self/fd/{how[0]}")).suffix or "dir")
            return real(*how)

        monkeypatch.setattr(os, name, spy)
    unlink = Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda *how, **more: (calls.append("unlink"), unlink(*how, **more)))
    write(tmp_path, ARRAYS)
    calls.clear()
    write(tmp_path, ARRAYS)
    assert calls == [".safetensors", ".safetensors", ".json", "dir", "replace", "dir", "unlink", "unlink"]


def test_a_save_warns_about_nothing(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(4):
            write(tmp_path, ARRAYS, {"n": 1}, step=step, keep=2)

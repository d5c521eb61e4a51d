"""Files that are not whole, or not ours: they are refused with the reason."""

import json
import os
import random

import pytest

from checkpoint_support import ARRAYS, files, same
from unidist.checkpoint import read, write
from unidist.errors import CheckpointError, UnidistError, UsageError


def test_every_truncation_is_noticed(tmp_path):
    write(tmp_path, ARRAYS, {"n": 1})
    for file in sorted(tmp_path.iterdir()):
        whole = file.read_bytes()
        for length in {0, 1, 7, 8, 20, len(whole) // 2, len(whole) - 2, len(whole) - 1} - {
            len(whole) - 1 if file.suffix == ".json" else -1  # the last line end means nothing
        }:
            file.write_bytes(whole[:length])
            with pytest.raises(CheckpointError, match=r"truncated|damaged"):
                read(tmp_path)
        file.write_bytes(whole + b"x")
        with pytest.raises(CheckpointError, match="damaged"):
            read(tmp_path)
        file.write_bytes(whole)
    same(read(tmp_path))


def test_a_flipped_bit_is_noticed(tmp_path):
    """Or means nothing: a flip in the indentation of the JSON leaves all values as they were."""
    write(tmp_path, ARRAYS, {"n": 12345, "rate": 0.1, "name": "abc"})
    dice = random.Random(0)
    for file in sorted(tmp_path.iterdir()):
        whole = bytearray(file.read_bytes())
        for bit in dice.sample(range(8 * len(whole)), 500):
            whole[bit // 8] ^= 1 << bit % 8
            file.write_bytes(whole)
            whole[bit // 8] ^= 1 << bit % 8
            try:
                got = read(tmp_path)
            except CheckpointError:
                continue
            assert file.suffix == ".json"
            assert chr(whole[bit // 8]) in " \n"
            assert got.values == {"n": 12345, "rate": 0.1, "name": "abc"}
        file.write_bytes(whole)


def test_foreign_files_are_named_as_such(tmp_path):
    for place, content, words in [
        ("nothing", None, "there is no checkpoint at"),
        ("empty", {}, "It holds nothing"),
        ("torch", {"model.pt": b"PK", "x.bin": b""}, r"not a unidist checkpoint.*model.pt, x.bin"),
        ("other", {"checkpoint.json": b'{"all_model_checkpoint_paths": []}'}, "another program's"),
        ("list", {"checkpoint.json": b"[1]"}, "another program's"),
        ("text", {"checkpoint.json": b"\xff\xfe"}, "truncated or damaged"),
        ("deep", {"checkpoint.json": b"[" * 100_000}, "truncated or damaged"),
    ]:
        if content is not None:
            (tmp_path / place).mkdir()
            for name, data in content.items():
                (tmp_path / place / name).write_bytes(data)
        with pytest.raises(CheckpointError, match=words) as raised:
            read(tmp_path / place)
        assert isinstance(raised.value, UnidistError)
    for data in (b"", b"PK\x03\x04", b"\x80\x02}q", b"\xff" * 64, b"\x08" + bytes(7) + b'{"a":1} '):
        (tmp_path / "weights.pt").write_bytes(data)
        with pytest.raises(CheckpointError, match="not a whole safetensors file"):
            read(tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match="another program's"):
        write(tmp_path / "other", ARRAYS)  # not overwritten
    assert files(tmp_path / "other") == ["checkpoint.json"]
    with pytest.raises(CheckpointError, match="give the directory"):
        read(tmp_path / "other" / "checkpoint.json")


def test_what_is_no_file_is_not_waited_for(tmp_path):
    """A pipe of a file's name would block whoever opens it, until someone writes to it."""
    write(tmp_path, ARRAYS)
    (file,) = tmp_path.glob("model-*")
    for each in (file, tmp_path / "checkpoint.json"):
        each.unlink()
        os.mkfifo(each)
        with pytest.raises(CheckpointError, match="no regular file"):
            read(tmp_path)
    (tmp_path / "checkpoint.json").unlink()
    (tmp_path / "checkpoint.json").mkdir()
    with pytest.raises(CheckpointError, match=r"no regular file|Is a directory"):
        read(tmp_path)
    for path in ("a\0b", b"a", None):
        with pytest.raises(UsageError, match="the path is"):
            read(path)
        with pytest.raises(UsageError, match="the path is"):
            write(path, ARRAYS)


def test_another_version_is_named(tmp_path):
    write(tmp_path, ARRAYS)
    file = tmp_path / "checkpoint.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"version": 2, "unidist": "9.0"}))
    with pytest.raises(CheckpointError, match=r"format version 2, this unidist .* reads 1.*unidist 9\.0"):
        read(tmp_path)


def test_a_damaged_checkpoint_can_be_saved_over(tmp_path):
    write(tmp_path, ARRAYS)
    (tmp_path / "checkpoint.json").write_bytes(b"{")
    write(tmp_path, ARRAYS)
    same(read(tmp_path))
    assert len(files(tmp_path)) == 3

"""The portable checkpoint: what went in comes out, and what is not whole is refused with the reason."""

import json
import os
import random
import resource
import stat
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from unidist.checkpoint import Checkpoint, latest, read, rng, write
from unidist.checkpoint.agreement import Agreement
from unidist.errors import CheckpointError, UnidistError, UsageError

ARRAYS = {
    "model/0.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "model/0.bias": np.zeros(3, np.float16),
    "optimizer/velocity/0.weight": np.full((2, 3), 0.5),
}


def same(got: Checkpoint, arrays=ARRAYS):
    assert got.arrays.keys() == arrays.keys()
    for name, array in arrays.items():
        assert got.arrays[name].dtype == array.dtype
        assert got.arrays[name].shape == array.shape
        assert got.arrays[name].tobytes() == array.tobytes()


def files(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def test_round_trip(tmp_path):
    path = tmp_path / "deep" / "final"
    values = {"epoch": 3, "loader": {"consumed": 1200}, "note": "é \ud800", "big": 2**70, "small": 5e-324}
    assert write(path, ARRAYS, values) == path
    got = read(path)
    same(got)
    assert got.values == values
    assert got.path == path
    assert got.section("model").keys() == {"0.weight", "0.bias"}
    got.arrays["model/0.weight"] += 1  # what was read is the caller's
    assert len(files(path)) == 3


@pytest.mark.parametrize(
    "array",
    [
        np.array(3.5),
        np.zeros((0, 4), np.int8),
        np.arange(12).reshape(3, 4).T,
        np.arange(12)[::-2],
        np.arange(3, dtype=">i4"),
        np.array([True, False]),
        np.array([1, 2**64 - 1], np.uint64),
        np.array([np.nan, -0.0, np.inf], np.float32),
        np.array([1 + 2j], np.complex64),
        np.float32(2.5),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_every_kind_of_array(tmp_path, array):
    write(tmp_path / "c", {"a/b": array})
    got = read(tmp_path / "c").arrays["a/b"]
    np.testing.assert_array_equal(got, array)
    assert got.shape == array.shape
    assert got.dtype == array.dtype.newbyteorder("=")


def test_other_tools_read_the_file_as_it_is(tmp_path):
    """Byte for byte what the safetensors library writes, without its temporary file's permissions."""
    write(tmp_path / "c", ARRAYS)
    (file,) = (tmp_path / "c").glob("model-*.safetensors")
    inner = {"0.weight": ARRAYS["model/0.weight"], "0.bias": ARRAYS["model/0.bias"]}
    assert safetensors.numpy.load_file(file).keys() == inner.keys()
    assert file.read_bytes() == safetensors.numpy.save(inner)
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~umask


def test_values_come_back_as_they_were(tmp_path):
    values = {
        "nan": float("nan"),
        "inf": [float("inf"), -float("inf"), -0.0],
        "tuple": (1, (2.5, "x"), []),
        "keys": {0: "a", "1": "b", None: 2},
        "$odd": {"$float": "nan", "x": {"$tuple": []}},
        "none": None,
        "bools": [True, False],
        "empty": [{}, [], (), ""],
    }
    write(tmp_path / "c", {}, values)
    got = read(tmp_path / "c").values
    assert repr(got) == repr(values)  # nan is not equal to itself
    assert "NaN" not in (tmp_path / "c" / "checkpoint.json").read_text()


def test_numpy_scalars_become_python_numbers(tmp_path):
    write(tmp_path / "c", {}, {"a": np.float32(0.1), "b": np.int64(3), "c": np.bool_(True), "d": np.float64(0.1)})
    got = read(tmp_path / "c").values
    assert got == {"a": float(np.float32(0.1)), "b": 3, "c": True, "d": 0.1}
    assert [type(each) for each in got.values()] == [float, int, bool, float]


def test_what_cannot_come_back_is_refused_before_the_disk_is_touched(tmp_path):
    circle = []
    circle.append(circle)
    for values, where in [
        ({"a": [1, {"b": {1}}]}, r"values\['a'\]\[1\]\['b'\] is of type set"),
        ({"a": np.zeros(2)}, r"is of type ndarray.*use \.tolist\(\) or \.item\(\)"),
        ({"a": b"x"}, "bytes"),
        ({"a": 1j}, "complex"),
        ({"a": np.complex64(1)}, "complex"),
        ({(1, 2): 3}, "key"),
        ({1.5: 3}, "key"),
        ({"a": circle}, "hold itself"),
        ({"a": 10**5000}, r"\['a'\] is a whole number of some 49\d\d digits"),
        ({"a": np.longdouble(1)}, r"\['a'\] is of type (longdouble|float128), .* of them$"),
    ]:
        with pytest.raises(UsageError, match=where):
            write(tmp_path / "c", ARRAYS, values)
    for arrays, where in [
        ({"weight": np.zeros(1)}, "section"),
        ({"/weight": np.zeros(1)}, "section"),
        ({"../x/weight": np.zeros(1)}, "section"),
        ({"model/": np.zeros(1)}, "section"),
        ({"model/__metadata__": np.zeros(1)}, "keeps for itself"),
        ({"model/x": [1.0]}, "model/x is of type list"),
        ({"model/x": np.array(["a"])}, "model/x has dtype"),
        ({"model/x": np.array([object()])}, "model/x has dtype"),
        ({"model/x": np.zeros(1, np.complex128)}, "model/x has dtype"),
    ]:
        with pytest.raises(UsageError, match=where):
            write(tmp_path / "c", arrays)
    for how in ({"keep": 2}, {"keep": 0, "step": 1}, {"step": -1}, {"step": 1.5}, {"step": True}):
        with pytest.raises(UsageError, match=r"keep|step"):
            write(tmp_path / "c", ARRAYS, **how)
    assert files(tmp_path) == []


def test_a_second_save_replaces_the_first_and_leaves_nothing_of_it(tmp_path):
    write(tmp_path, ARRAYS, {"n": 1})
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "model-0123456789abcdef.safetensors").write_text("of a killed writer")
    (tmp_path / ".checkpoint-0123456789abcdef.json").write_text("of a killed writer")
    write(tmp_path, {"model/a": np.ones(2)}, {"n": 2})
    got = read(tmp_path)
    same(got, {"model/a": np.ones(2)})
    assert got.values == {"n": 2}
    assert len(files(tmp_path)) == 3  # with the user's own file


def test_only_some_sections(tmp_path):
    write(tmp_path, ARRAYS, {"n": 1})
    (file,) = tmp_path.glob("optimizer-*")
    file.unlink()
    same(read(tmp_path, only=["model"]), {k: v for k, v in ARRAYS.items() if k.startswith("model/")})
    with pytest.raises(CheckpointError, match=r"no section 'loader', it has model, optimizer"):
        read(tmp_path, only=["loader"])
    with pytest.raises(CheckpointError, match=r"not whole: optimizer-.* is missing"):
        read(tmp_path)


def test_a_plain_file_of_weights(tmp_path):
    safetensors.numpy.save_file({"0.weight": np.ones(2)}, tmp_path / "w.safetensors")
    got = read(tmp_path / "w.safetensors")
    same(got, {"model/0.weight": np.ones(2)})
    assert got.values == {}


def test_bfloat16_of_other_tools_comes_as_the_same_float32(tmp_path):
    header = json.dumps(
        {
            "w": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]},
            "b": {"dtype": "F32", "shape": [], "data_offsets": [4, 8]},
        }
    ).encode()
    data = b"\x80\x3f\x20\xc0" + np.float32(7).tobytes()
    (tmp_path / "w.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    got = read(tmp_path / "w.safetensors").section("model")
    assert got["w"].dtype == np.float32
    assert got["w"].tolist() == [1.0, -2.5]
    assert got["b"] == 7


# -- numbered checkpoints ------------------------------------------------------------------------------------


def test_keep_the_last_ones(tmp_path):
    folder = tmp_path / "ckpt"
    assert latest(folder) is None
    for step in (40, 80, 120, 160):
        assert write(folder, ARRAYS, {"step": step}, step=step, keep=3) == folder / f"step-{step:06d}"
    assert files(folder) == ["step-000080", "step-000120", "step-000160"]
    assert latest(folder) == folder / "step-000160"
    assert read(folder).values == {"step": 160}
    assert read(folder / "step-000080").values == {"step": 80}
    assert latest(folder / "step-000080") == folder / "step-000080"
    write(folder, ARRAYS, {"step": 2_000_000}, step=np.int64(2_000_000))
    assert read(folder).path == folder / "step-2000000"
    assert len(files(folder)) == 4  # no keep: nothing is removed


def test_after_going_back_the_last_written_is_the_newest(tmp_path):
    for step in (1, 2, 3):
        write(tmp_path, {}, {"run": "first"}, step=step, keep=3)
    write(tmp_path, {}, {"run": "second"}, step=2, keep=3)
    assert read(tmp_path).values == {"run": "second"}
    write(tmp_path, {}, {"run": "second"}, step=4, keep=2)
    assert files(tmp_path) == ["step-000002", "step-000004"]


def test_what_a_killed_writer_left_in_a_folder_goes_with_the_next_save(tmp_path):
    half = tmp_path / "step-000001"
    half.mkdir()
    (half / "model-0123456789abcdef.safetensors").write_bytes(b"half")
    (tmp_path / "step-000000").mkdir()
    (tmp_path / "step-000000" / "mine.txt").write_text("stays")
    assert latest(tmp_path) is None
    with pytest.raises(CheckpointError, match="not whole: its first save was interrupted"):
        read(half)
    write(tmp_path, ARRAYS, step=5)
    assert files(tmp_path) == ["step-000000", "step-000005"]
    assert files(tmp_path / "step-000000") == ["mine.txt"]


def test_a_damaged_newest_is_passed_over_with_a_warning(tmp_path):
    for step in (1, 2, 3):
        write(tmp_path, ARRAYS, step=step)
    for file in (tmp_path / "step-000003").glob("model-*"):
        os.truncate(file, 10)
    (tmp_path / "step-000002" / "checkpoint.json").write_text("{")
    with pytest.warns(RuntimeWarning, match="passed over: .*step-00000[23]"):
        assert latest(tmp_path) == tmp_path / "step-000001"


# -- files that are not whole, or not ours -------------------------------------------------------------------


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


# -- a disk that does not take it ----------------------------------------------------------------------------


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


# -- the rest ------------------------------------------------------------------------------------------------


def test_random_generators(tmp_path):
    random.gauss(0, 1), np.random.normal()  # each keeps a second number for the next call
    write(tmp_path, {f"rng/{name}": array for name, array in rng.capture().items()})
    first = [random.gauss(0, 1), random.random(), np.random.normal(), np.random.rand()]
    state = read(tmp_path).section("rng")
    rng.restorer(state)()
    assert [random.gauss(0, 1), random.random(), np.random.normal(), np.random.rand()] == first
    beyond = state["numpy"].copy()
    beyond[624] = 625
    before = rng.capture()
    for damage in (
        {"python": np.zeros(3)},
        {"python": np.full(625, 2**32 - 1, np.uint32)},
        {"python": state["python"].astype(np.float64)},
        {"python": np.zeros(625, np.uint32)},
        {"python_gauss": np.array([1.0, np.nan])},
        {"python_gauss": np.array([2.0, 0.0])},
        {"numpy": np.zeros(2)},
        {"numpy": beyond},
        {"numpy_gauss": np.array([1, 0])},
    ):
        with pytest.raises(CheckpointError, match="generator state"):
            rng.restorer(state | damage)
        missing = {name: array for name, array in state.items() if name not in damage}
        with pytest.raises(CheckpointError, match="generator state"):
            rng.restorer(missing)
    for name, array in rng.capture().items():
        np.testing.assert_array_equal(array, before[name])


def test_reading_runs_no_code():
    """No pickle anywhere below unidist.checkpoint, and importing unidist loads none of it."""
    script = (
        "import sys, unidist; assert not {'numpy', 'safetensors', 'unidist.checkpoint'} & set(sys.modules);"
        "import unidist.checkpoint; assert not {'torch', 'mxnet', 'oneflow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    import unidist.checkpoint

    for file in Path(unidist.checkpoint.__file__).parent.glob("*.py"):
        assert "import pickle" not in file.read_text()


def test_an_empty_path_is_refused_and_not_taken_for_the_current_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for act in (lambda: write("", ARRAYS, {}), lambda: read(""), lambda: latest("")):
        with pytest.raises(UsageError, match=r"the path is empty: name a folder, or write '\.'"):
            act()
    assert not list(tmp_path.iterdir())
    write(".", ARRAYS, {})
    same(read("."))


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (CheckpointError("the file is damaged"), "on any rank. Correct this, or load another checkpoint."),
        (UsageError("the path is empty"), "the path is empty.\nNothing was changed on any rank."),
    ],
)
def test_another_checkpoint_is_advised_only_where_the_checkpoint_is_at_fault(error, ends):
    def fail():
        raise error

    with pytest.raises(type(error)) as raised:
        Agreement(lambda said: [said], 0, "load out").each(fail)
    assert str(raised.value).endswith(ends)


def test_a_save_warns_about_nothing(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(4):
            write(tmp_path, ARRAYS, {"n": 1}, step=step, keep=2)

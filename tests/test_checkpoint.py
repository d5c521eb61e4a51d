"""The portable checkpoint: what went in comes out, and the last ones are kept."""

import json
import os
import random
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from checkpoint_support import ARRAYS, files, same
from unidist.checkpoint import latest, read, rng, write
from unidist.checkpoint.agreement import Agreement
from unidist.errors import CheckpointError, UsageError


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
        Agreement(lambda topic, said: [said], 0, "load out").each(fail)
    assert str(raised.value).endswith(ends)

"""What arrays are called in each framework, and what is said when they do not fit."""

import numpy as np
import pytest

from unidist.checkpoint import compare, fit, strip_prefix
from unidist.errors import CheckpointError
from unidist_mxnet.names import portable

# As MXNet 1.9.1's `_collect_params_with_prefix` and torch 2.13's `state_dict` list them.
PAIRS = {
    "0.weight": "0.weight",  # Dense
    "0.bias": "0.bias",
    "features.1.gamma": "features.1.weight",  # BatchNorm
    "features.1.beta": "features.1.bias",
    "features.1.running_mean": "features.1.running_mean",
    "features.1.running_var": "features.1.running_var",
    "3.alpha": "3.weight",  # PReLU
    "gamma": "weight",  # a LayerNorm that is the whole model
    "4._unfused.0.l_cell.i2h_weight": "4.weight_ih_l0",  # LSTM, bidirectional
    "4._unfused.0.l_cell.h2h_bias": "4.bias_hh_l0",
    "4._unfused.1.r_cell.i2h_bias": "4.bias_ih_l1_reverse",
    "4._unfused.1.r_cell.h2h_weight": "4.weight_hh_l1_reverse",
    "4._unfused.0.l_cell.h2r_weight": "4.weight_hr_l0",
    "4._unfused.1.r_cell.h2r_weight": "4.weight_hr_l1_reverse",
    "5._unfused.0.h2r_weight": "5.weight_hr_l0",
    "5._unfused.0.i2h_weight": "5.weight_ih_l0",  # GRU
    "5._unfused.1.h2h_bias": "5.bias_hh_l1",
    "_unfused.0.i2h_weight": "weight_ih_l0",
    "7.i2h_weight": "7.weight_ih",  # LSTMCell
    "7.h2h_bias": "7.bias_hh",
    "6.weight": "6.weight",  # Embedding
    "my_gamma": "my_gamma",
    "gamma.scale": "gamma.scale",
}


def specs(**arrays):
    return {name: (array.shape, array.dtype) for name, array in arrays.items()}


def test_gluon_names():
    assert portable(PAIRS) == PAIRS


def test_names_that_would_become_one_stay_two():
    names = ["block.weight", "block.gamma", "norm.gamma"]
    assert portable(names) == {
        "block.weight": "block.weight",
        "block.gamma": "block.gamma",
        "norm.gamma": "norm.weight",
    }


def test_wrappers_are_stripped_only_when_they_are_wrappers():
    x = np.zeros(1)
    assert list(strip_prefix({"module.a": x, "module.b": x})) == ["a", "b"]
    assert list(strip_prefix({"_orig_mod.module.a": x})) == ["a"]
    assert list(strip_prefix({"module.a": x, "head": x})) == ["module.a", "head"]
    assert list(strip_prefix({"module.a": x}, expected=["module.a"])) == ["module.a"]
    assert list(strip_prefix({"module.module.a": x}, expected=["module.a"])) == ["module.a"]
    assert strip_prefix({}) == {}


def test_fit_gives_the_arrays_in_the_order_of_the_model():
    arrays = {"module.b": np.ones(2, np.float32), "module.a": np.zeros((2, 2), np.float32)}
    got = fit(arrays, {"a": ((2, 2), "torch.float32"), "b": ([2], "torch.bfloat16")})
    assert list(got) == ["a", "b"]


def test_the_count_of_batches_is_only_torchs():
    norm = {"1.weight": np.ones(3), "1.running_mean": np.ones(3)}
    counted = norm | {"1.num_batches_tracked": np.array(7)}
    assert list(fit(counted, specs(**norm))) == list(norm)
    filled = fit(norm, specs(**counted))["1.num_batches_tracked"]
    assert (filled.shape, filled.dtype, int(filled)) == ((), np.int64, 0)
    assert fit(counted, specs(**counted))["1.num_batches_tracked"] == 7
    with pytest.raises(CheckpointError, match=r"missing +2\.num_batches_tracked"):
        fit(norm, specs(**counted) | {"2.num_batches_tracked": ((), "int64")})


def test_what_differs_is_listed_with_the_nearest_name():
    expected = {"fc.weight": ((10, 4), "float32"), "conv.weight": ((8, 3, 3, 3), None), "same": ((1,), "torch.int64")}
    found = {"fc1.weight": np.zeros((10, 4)), "conv.weight": np.zeros((8, 1, 3, 3)), "same": np.zeros(1)}
    with pytest.raises(CheckpointError) as raised:
        compare(expected, found, what="the optimizer")
    text = str(raised.value)
    assert text.startswith(
        "the checkpoint does not fit the optimizer: 1 names missing, 1 unexpected, 1 of another shape"
    )
    assert "missing     fc.weight (10, 4) (nearest: fc1.weight)" in text
    assert "unexpected  fc1.weight (10, 4) (nearest: fc.weight)" in text
    assert "shape       conv.weight is (8, 1, 3, 3), the optimizer has (8, 3, 3, 3)" in text
    assert "dtype       same is float64, the optimizer has torch.int64" in text


def test_the_list_of_differences_is_short():
    expected = {f"layer{i}.weight": ((2,), None) for i in range(500)}
    with pytest.raises(CheckpointError, match="492 more") as raised:
        compare(expected, {})
    assert len(str(raised.value).splitlines()) == 10


@pytest.mark.parametrize("dtype", ["float32", "torch.float16", "bfloat16", np.float64, np.dtype("f4"), None])
def test_floats_of_any_width_fit(dtype):
    compare({"a": ((1,), dtype)}, {"a": np.zeros(1, np.float32)})


@pytest.mark.parametrize("dtype", ["torch.int64", np.int32, np.dtype(bool), "complex64"])
def test_other_kinds_do_not(dtype):
    with pytest.raises(CheckpointError, match="dtype"):
        compare({"a": ((1,), dtype)}, {"a": np.zeros(1, np.float32)})


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (np.array([300]), "torch.int8"),
        (np.array([-1]), "uint8"),
        (np.array([2**64 - 1], np.uint64), "oneflow.int64"),
        (np.array([1.0, 1e300]), "torch.float32"),
        (np.array([np.nan, -1e5]), np.float16),
        (np.array([3.4e38], np.float32), "torch.bfloat16"),
    ],
)
def test_values_that_the_models_dtype_cannot_hold_are_refused(array, dtype):
    with pytest.raises(CheckpointError, match=r"counts has values from .* cannot hold"):
        fit({"counts": array}, {"counts": ((len(array),), dtype)})


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (np.array([127, -128]), "torch.int8"),
        (np.array([2**63 - 1], np.uint64), np.int64),
        (np.array([np.inf, np.nan, 3e38]), "torch.float32"),
        (np.array([np.nan]), np.float16),
        (np.zeros(0), np.float16),
        (np.array([True]), "torch.bool"),
    ],
)
def test_values_that_it_can_hold_are_not(array, dtype):
    assert fit({"counts": array}, {"counts": ((len(array),), dtype)})["counts"] is array

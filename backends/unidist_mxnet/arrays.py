"""Arrays in and out of MXNet, without its slow conversions."""

from __future__ import annotations

import ctypes

import mxnet as mx
import numpy as np
from mxnet import nd
from mxnet.base import _LIB, check_call


def from_numpy(array: np.ndarray, context: mx.Context) -> nd.NDArray:
    """A copy on the device. Not nd.array, whose checks take longer than the copy, nor nd.from_numpy, which would keep
    hold of the source from a thread of the engine."""
    if array.ndim == 0 or array.size == 0:
        with mx.util.np_shape(True):
            return mx.np.array(array, dtype=array.dtype, ctx=context).as_nd_ndarray()
    array = np.ascontiguousarray(array)
    result = nd.empty(array.shape, context, dtype=array.dtype)
    source, count = array.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(array.size)
    check_call(_LIB.MXNDArraySyncCopyFromCPU(result.handle, source, count))
    return result.as_np_ndarray() if mx.util.is_np_array() else result


def kind_like(tensor: nd.NDArray, array: np.ndarray) -> nd.NDArray:
    """The array as the kind of tensor (mx.nd or mx.np) that was given, on its device."""
    result = from_numpy(array, tensor.context)
    if isinstance(tensor, mx.np.ndarray):
        return result.as_np_ndarray()
    return result.as_nd_ndarray() if isinstance(result, mx.np.ndarray) else result


def number_like(loss: nd.NDArray, number: nd.NDArray) -> nd.NDArray:
    """One number as the loss has it."""
    number = number.as_in_context(loss.context)
    if loss.dtype != number.dtype:
        number = number.astype(loss.dtype)
    if isinstance(loss, mx.np.ndarray):
        number = number.as_np_ndarray()
    return number if loss.shape == number.shape else number.reshape(loss.shape)


def in_default_layout(array: nd.NDArray) -> nd.NDArray:
    """The same array. The forward pass of evaluation leaves the weights of convolutions in memory as oneDNN likes it,
    which MXNet's own operators understand; a KVStore and Horovod do not. Call nd.waitall() first."""
    check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(ctypes.c_void_p())))  # which lays it out again
    return array


def set_values(parameter: mx.gluon.Parameter, values: np.ndarray) -> None:
    current = parameter.list_data()[0]
    parameter.set_data(kind_like(current, values.astype(current.dtype)))

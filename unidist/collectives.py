"""Collectives on whatever users hold: native tensors, numpy arrays, numbers, and dicts, lists and tuples of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from unidist.errors import UsageError

if TYPE_CHECKING:
    from unidist.backend import Backend, Reduction

Array = np.ndarray[Any, Any]

REDUCTIONS = ("mean", "sum", "min", "max")
NUMBERS = (bool, int, float)


class Collectives:
    """What went in comes out in kind, never in place. `within` is told what is about to happen, leaf by leaf."""

    def __init__(self, backend: Backend, within: Callable[[str, str], AbstractContextManager[None]] | None) -> None:
        self._backend, self._within = backend, within

    def all_reduce(self, value: Any, op: str) -> Any:
        """Integers and bools have a float64 mean; the sum of bools is a count."""
        if op not in REDUCTIONS:
            raise UsageError(f"op is {op!r}, it must be one of {', '.join(REDUCTIONS)}")
        tree = Tree(value, self._backend)
        reduction: Reduction = "sum" if op == "mean" else op  # type: ignore[assignment]
        size = self._backend.world.world_size

        def on_tensor(tensor: Any) -> Any:
            if "complex" in str(tensor.dtype):
                raise UsageError("all_reduce cannot take complex tensors: reduce the real and imaginary parts")
            if op == "mean" and "float" not in str(tensor.dtype):
                tensor = self._backend.from_numpy(self._backend.to_numpy(tensor).astype(np.float64))
            reduced = self._backend.all_reduce(tensor, reduction)
            return reduced / size if op == "mean" else reduced

        def on_arrays(arrays: list[Array]) -> list[Array]:
            carried: list[Array] = [array.astype(_carrier(array.dtype, op), copy=False) for array in arrays]
            reduced = self._flat(carried, lambda flat: [self._backend.all_reduce(flat, reduction)])[0]
            results = [array / size for array in reduced] if op == "mean" else reduced
            return [_back(result, array, op) for result, array in zip(results, arrays, strict=True)]

        with self._announced(f"all_reduce {op}", tree):
            return tree.rebuilt(on_tensor, on_arrays)

    def broadcast(self, value: Any, source: int) -> Any:
        tree = Tree(value, self._backend)
        with self._announced(f"broadcast from {source}", tree):
            return tree.rebuilt(
                lambda tensor: self._backend.broadcast(tensor, source),
                lambda arrays: self._bytes(arrays, lambda flat: [self._backend.broadcast(flat, source)])[0],
            )

    def all_gather(self, value: Any) -> list[Any]:
        """A list with what each rank put in, by rank."""
        tree = Tree(value, self._backend)
        with self._announced("all_gather", tree):
            tensors = [self._backend.all_gather(tensor) for tensor in tree.tensors]
            arrays = self._bytes(tree.arrays, self._backend.all_gather)
        return [
            tree.filled([gathered[rank] for gathered in tensors], arrays[rank])
            for rank in range(self._backend.world.world_size)
        ]

    def barrier(self) -> None:
        with self._announced("barrier"):
            self._backend.barrier()

    def _announced(self, what: str, tree: Tree | None = None) -> AbstractContextManager[None]:
        if self._within is None:
            return nullcontext()
        return self._within(what, tree.signature if tree else "")

    def _flat(self, arrays: list[Array], collective: Callable[[Any], list[Any]]) -> list[list[Array]]:
        """One collective for each dtype instead of one for each array; a list of the arrays for each result."""
        results: list[list[Array]] = []
        for dtype in sorted({array.dtype for array in arrays}, key=str):
            chosen = [i for i, array in enumerate(arrays) if array.dtype == dtype]
            flat = np.concatenate([arrays[i].reshape(-1) for i in chosen])
            for n, tensor in enumerate(collective(self._backend.from_numpy(flat))):
                if n == len(results):
                    results.append(list(arrays))
                parts = np.split(self._backend.to_numpy(tensor), np.cumsum([arrays[i].size for i in chosen])[:-1])
                for i, part in zip(chosen, parts, strict=True):
                    results[n][i] = part.reshape(arrays[i].shape)
        return results or [[]]

    def _bytes(self, arrays: list[Array], collective: Callable[[Any], list[Any]]) -> list[list[Array]]:
        """Moving needs no arithmetic: as bytes every dtype passes, in one call, exactly."""
        if not arrays:
            return [[] for _ in range(self._backend.world.world_size)]
        raw = [np.frombuffer(array.tobytes(), dtype=np.uint8) for array in arrays]
        return [
            [part.copy().view(array.dtype).reshape(array.shape) for part, array in zip(parts, arrays, strict=True)]
            for parts in self._flat(raw, collective)
        ]


class Tree:
    """The leaves of a nested value: native tensors one by one, arrays and numbers as arrays, and the way back."""

    def __init__(self, value: Any, backend: Backend) -> None:
        self._value, self._backend = value, backend
        self.tensors: list[Any] = []
        self.arrays: list[Array] = []
        self.signature = self._collect(value, "value")

    def _collect(self, value: Any, path: str) -> str:
        if self._backend.is_tensor(value):
            self.tensors.append(value)
            return f"{value.dtype} {tuple(value.shape)}"
        if isinstance(value, dict):
            # Sorted: ranks may have filled theirs in different orders.
            items = [f"{key}: {self._collect(value[key], f'{path}[{key!r}]')}" for key in sorted(value, key=str)]
            return "{" + ", ".join(items) + "}"
        if isinstance(value, (list, tuple)):
            return "[" + ", ".join(self._collect(item, f"{path}[{i}]") for i, item in enumerate(value)) + "]"
        if isinstance(value, (np.ndarray, np.generic, *NUMBERS)):
            array = np.asarray(value)
            if array.dtype.kind not in "biufc":
                raise UsageError(f"{path} has dtype {array.dtype}: collectives take numbers")
            self.arrays.append(array)
            return f"{array.dtype} {array.shape}"
        raise UsageError(
            f"{path} is of type {type(value).__name__}: collectives take {self._backend.framework} tensors, numpy "
            "arrays, numbers, and dicts, lists and tuples of them"
        )

    def filled(self, tensors: list[Any], arrays: list[Array]) -> Any:
        """The same nesting with other leaves, in the order in which they were collected."""
        coming = iter(tensors)
        return self.rebuilt(lambda _: next(coming), lambda _: arrays)

    def rebuilt(self, on_tensor: Callable[[Any], Any], on_arrays: Callable[[list[Array]], list[Array]]) -> Any:
        arrays = iter(on_arrays(self.arrays) if self.arrays else [])
        return self._rebuild(self._value, on_tensor, arrays)

    def _rebuild(self, value: Any, on_tensor: Callable[[Any], Any], arrays: Iterator[Array]) -> Any:
        if self._backend.is_tensor(value):
            return on_tensor(value)
        if isinstance(value, dict):
            rebuilt = {key: self._rebuild(value[key], on_tensor, arrays) for key in sorted(value, key=str)}
            return {key: rebuilt[key] for key in value}
        if isinstance(value, (list, tuple)):
            parts = [self._rebuild(item, on_tensor, arrays) for item in value]
            return (
                type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
            )  # a namedtuple takes them apart
        array = next(arrays)
        if isinstance(value, NUMBERS) and not isinstance(value, np.generic):
            return array.item()
        return array[()] if isinstance(value, np.generic) else array


def _carrier(dtype: np.dtype[Any], op: str) -> type:
    """The dtype in which a reduction is carried out; every backend can do these three."""
    if dtype.kind == "c" or dtype == np.uint64 or dtype.itemsize > 8:
        raise UsageError(f"all_reduce cannot take dtype {dtype}: convert it to float64 or int64 first")
    if dtype.kind in "biu":
        return np.float64 if op == "mean" else np.int64
    return np.float32 if dtype.itemsize <= 4 else np.float64


def _back(result: Array, given: Array, op: str) -> Array:
    """The result in the dtype that went in, except where the operation leaves it: counts, and means of integers."""
    if given.dtype.kind in "biu" and (op == "mean" or (op == "sum" and given.dtype.kind == "b")):
        return result
    if given.dtype.kind in "iu" and result.size:
        limits = np.iinfo(given.dtype)
        if result.min() < limits.min or result.max() > limits.max:
            raise UsageError(f"all_reduce {op} does not fit into {given.dtype}: convert to int64 or float64 first")
    return result.astype(given.dtype, copy=False)

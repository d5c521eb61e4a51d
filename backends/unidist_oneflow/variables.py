"""Global tensors and the local tensors that share their memory: what is done to one of them is done to both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import oneflow as flow
from oneflow import nn

Tensor = Any


def global_twin(local: Tensor, placement: Any) -> Tensor:
    """A tensor that is whole on every rank, with the values of rank 0. All ranks call this together."""
    whole = local.detach().to_global(placement=placement, sbp=flow.sbp.broadcast)
    local.data = whole.to_local()
    return nn.Parameter(whole, requires_grad=local.requires_grad) if isinstance(local, nn.Parameter) else whole


class Variables(nn.Module):  # type: ignore[misc]  # OneFlow is not there to be checked
    """What graphs of one model read and write beside its parameters. (A number that was an input of a graph would wake
    one more of OneFlow's threads in each step; one that was none would be compiled in.)"""

    def __init__(self, placement: Any) -> None:
        super().__init__()
        self._placement = placement
        self._numbers: dict[str, tuple[Tensor, float]] = {}  # local tensor, its value

    def share(self, name: str, tensor: Tensor) -> None:
        self.register_buffer(name, global_twin(tensor, self._placement))

    def set(self, name: str, value: float) -> None:
        """Set a number that may change from run to run. All ranks set the same ones."""
        value = float(value)
        if name not in self._numbers:
            self._numbers[name] = (flow.full((1,), value, dtype=flow.float32), value)
            self.share(name, self._numbers[name][0])
        tensor, before = self._numbers[name]
        if value != before:
            tensor.fill_(value)
            self._numbers[name] = (tensor, value)


class Faces:
    """A module's parameters and buffers as global tensors, and as the local tensors that share their memory.

    The local ones are the user's own objects: an optimizer that was made from them before goes on moving the model.
    """

    def __init__(self, model: Any, placement: Any) -> None:
        self._entries: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []  # (a module's table, name, local, global)
        self.twins: dict[Tensor, Tensor] = {}  # global by local; a tensor that two modules share stays shared
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                for name, local in table.items():
                    if local is None:
                        continue
                    if local not in self.twins:
                        self.twins[local] = global_twin(local, placement)
                    self._entries.append((table, name, local, self.twins[local]))
        self.variables = Variables(placement)
        self._inside = 0  # how often `local` was entered and not left
        self._show(3)

    def _show(self, which: int) -> None:
        for entry in self._entries:
            entry[0][entry[1]] = entry[which]

    @contextmanager
    def local(self) -> Iterator[None]:
        """Inside, the module is one of local tensors."""
        self._inside += 1
        self._show(2)
        try:
            yield
        finally:
            self._inside -= 1
            self._show(2 if self._inside else 3)

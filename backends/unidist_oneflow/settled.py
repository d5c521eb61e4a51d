"""What `prepare` has settled about parameters: which are trained, and where their gradients are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from unidist.plugin import StateError
from unidist_oneflow.watched import watch

if TYPE_CHECKING:
    from unidist_oneflow.gradients import FlatGradients

Tensor = Any


class Parameter(NamedTuple):
    name: str
    shown: Tensor  # as the user sees it
    local: Tensor  # as a local tensor; in the mirrored view that is the same
    trained: bool
    gradient: Tensor | None  # the view of a flat buffer that `local.grad` is


class Settled:
    def __init__(
        self, shown: Mapping[str, Tensor], local: Mapping[str, Tensor], gradients: FlatGradients | None
    ) -> None:
        self._gradients = gradients
        self._entries = [
            Parameter(
                name, parameter, local[name], parameter.requires_grad, None if gradients is None else local[name].grad
            )
            for name, parameter in shown.items()
        ]
        self._changed = False  # perhaps
        self._numbers = {id(entry.local): number for number, entry in enumerate(self._entries)}
        tensors = [tensor for entry in self._entries for tensor in (entry.shown, entry.local)]
        watch(tensors, self)

    def touched(self, tensor: Tensor, what: str) -> None:
        self._changed = True
        if what in ("requires_grad", "requires_grad_"):
            self._keep_gradient(tensor)
        if what == "_zero_grad_" and self._gradients is not None:
            self._gradients.cleared()

    def _keep_gradient(self, tensor: Tensor) -> None:
        """With this flag OneFlow forgets that there is a gradient to add to: the next backward would put another one in
        its place."""
        number = self._numbers.get(id(tensor))
        if number is None:
            return
        entry = self._entries[number]
        if entry.gradient is not None and tensor.grad is entry.gradient:
            tensor.grad = entry.gradient
            self._entries[number] = entry._replace(gradient=tensor.grad)

    def check(self) -> None:
        """Refuse what would train wrongly. To look at each parameter takes long, and is only done for a reason."""
        if self._gradients is not None:
            self._gradients.check()
        if not self._changed:
            return
        for name, shown, local, trained, gradient in self._entries:
            if shown.requires_grad != trained:
                raise StateError(
                    f"parameter {name} was {'frozen' if trained else 'unfrozen'} after prepare(), which has settled "
                    "what is trained and exchanged: set requires_grad before it. In the middle of a training, save, "
                    "prepare a new model and load"
                )
            if gradient is not None and local.grad is not gradient:
                raise StateError(
                    f"the gradient of parameter {name} was replaced, by zero_grad(set_to_none=True) or an assignment "
                    "to .grad: unidist clears gradients after each update, leave that to it"
                )
        self._changed = False

"""The gradients that a prepared model holds between the calls of a step: only steps may add to them or clear them."""

from __future__ import annotations

from operator import is_
from typing import Any

import torch

from unidist.plugin import StateError

SHARED = (
    "two prepared models share parameters, and one of them is in the middle of an accumulation group: finish its group "
    "before a step of the other, or prepare them without accumulate="
)


class Held:
    """Remembers all gradients after each backward, by object and version, to see whether anybody has touched one."""

    def __init__(self, model: Any) -> None:
        self._parameters: list[torch.Tensor] = list(model.parameters())  # frozen ones too: Horovod lets them thaw
        self._seen: list[torch.Tensor | None] = []
        self._versions: list[int | None] = []
        self._changed = False  # since the last backward, and averaged since then
        self.mean_weight: float | torch.Tensor = 1.0  # of the group whose gradients were exchanged last
        self.unwatched = False  # from the backward to the update
        self.in_group = False  # gradients have been accumulated that no update has used yet

    def check(self) -> None:
        """Before a backward: what there is comes from this group."""
        if not self.in_group:
            if any(parameter.grad is not None for parameter in self._parameters):
                raise StateError(
                    "the model holds gradients that no step has computed, as of a loss.backward() left in the loop: "
                    "leave it out, or call model.zero_grad() after it"
                )
        elif self._changed or self._touched():
            raise StateError(
                "the gradients were changed in the middle of an accumulation group, as by zero_grad() or by a "
                "backward() of the loop's own: leave it out, the step clears them after each update"
            )

    def remember(self) -> None:
        """After a backward."""
        self.in_group, self._changed = True, False
        if not self.unwatched:
            self._look()

    def divide(self, mean_weight: float | torch.Tensor) -> None:
        """A group in which nothing weighs anything has no gradient, and its mean weight is 0."""
        if isinstance(mean_weight, float) and mean_weight in (0.0, 1.0):
            return
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        torch._foreach_mul_(gradients, 1.0 / (mean_weight + (mean_weight == 0)))

    def averaged(self) -> None:
        """Our own change to them."""
        if self.in_group:
            self._look()

    def check_present(self) -> bool:
        """Before an average or an update; whether anybody else has changed them since the last backward, as by a
        clipping of the loop's own."""
        self._changed = self._changed or (self.in_group and not self.unwatched and self._touched())
        if self._changed and any(
            then is not None and parameter.grad is None
            for parameter, then in zip(self._parameters, self._seen, strict=True)
        ):
            raise StateError(
                "the gradients were cleared between backward and step, as by zero_grad(), so there is nothing to "
                "apply: leave it out, the step clears them after each update"
            )
        return self._changed

    def clear(self) -> None:
        self.in_group, self._changed = False, False
        self._seen, self._versions = [], []
        for parameter in self._parameters:
            parameter.grad = None

    def _look(self) -> None:
        self._seen = [parameter.grad for parameter in self._parameters]
        self._versions = [None if gradient is None else gradient._version for gradient in self._seen]

    def _touched(self) -> bool:
        now = [parameter.grad for parameter in self._parameters]
        versions = [None if gradient is None else gradient._version for gradient in now]
        return versions != self._versions or not all(map(is_, now, self._seen))

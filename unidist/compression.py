"""Ways to send less: what `prepare(…, compression=…)` takes beside the names "fp16" and "bf16"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from unidist.checks import check_whole, is_number
from unidist.errors import UsageError


@dataclass(frozen=True)
class TopK:
    """Only the largest `ratio` of each gradient travels; the rest waits and is added to the next. Nothing is lost."""

    ratio: float = 0.01

    def __post_init__(self) -> None:
        if not is_number(self.ratio) or not 0 < self.ratio <= 1:
            raise UsageError(f"TopK: ratio is {self.ratio!r}, it must be above 0 and at most 1")


@dataclass(frozen=True)
class PowerSGD:
    """Each gradient matrix travels as a product of two thin ones, of `rank` columns; the error is fed back."""

    rank: int = 2
    start: int = 10  # updates that are sent whole before it begins

    def __post_init__(self) -> None:
        for name in ("rank", "start"):
            least = 1 if name == "rank" else 2  # its first error is only known after one whole gradient
            check_whole(f"PowerSGD: {name}", getattr(self, name), least)


Compression = Literal["fp16", "bf16"] | TopK | PowerSGD


def check(value: object, precision: str | None) -> None:
    if precision == "fp16" and isinstance(value, (TopK, PowerSGD)):
        raise UsageError(
            f"{type(value).__name__} keeps back parts of gradients, and fp16 multiplies them by a loss scale that "
            "changes: use precision='bf16', or compression='fp16'"
        )
    if value not in (None, "fp16", "bf16") and not isinstance(value, (TopK, PowerSGD)):
        raise UsageError(f"compression is {value!r}, it must be 'fp16', 'bf16', unidist.TopK(…) or unidist.PowerSGD(…)")

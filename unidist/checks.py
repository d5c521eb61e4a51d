"""Checks of what users give, which many places make: numbers in range, names that are almost right, devices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard

from unidist.errors import UsageError

INFINITY = float("inf")
LONGEST_WAIT = 7 * 24 * 3600.0  # seconds; neither Python nor the engines can wait for ever, or for any number of them


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """ " Did you mean 'torch'?", or nothing where no known word is near."""
    import difflib  # only errors need it

    near = difflib.get_close_matches(str(word), list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


# -- numbers: True and False are none ---------------------------------------------------------------------------------


def is_whole(value: object, least: int | None = None, most: int | None = None) -> TypeGuard[int]:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return whole and (least is None or value >= least) and (most is None or value <= most)  # type: ignore[operator]


def is_number(value: object, least: float = -INFINITY, below: float = INFINITY) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value < below


# -- for options, whose names the user has written: what is wrong is a `UsageError` that says what it must be --------


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    if value not in choices:
        raise UsageError(f"{name} is {value!r}, it must be one of {', '.join(map(str, choices))}")


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise UsageError(f"{name} is {value!r}, it must be true or false")


def check_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:  # it may be infinite
        raise UsageError(f"{name} is {value!r}, it must be a number above 0")


def check_seconds(name: str, value: Any) -> float:
    """Returns how long to wait; infinitely long is as long as anything here waits."""
    check_positive(name, value)
    return float(min(value, LONGEST_WAIT))


def check_whole(name: str, value: object, least: int, most: int | None = None) -> None:
    if not is_whole(value, least, most):
        upper = " up" if most is None else f" to {most}"
        raise UsageError(f"{name} is {value!r}, it must be a whole number from {least}{upper}")


# -- for backends ----------------------------------------------------------------------------------------------------


def device_kind(asked: str | None, gpus: int) -> tuple[str, int | None]:
    """("cpu", None), ("cuda", None) or ("cuda", 1). Not asked for is a GPU where there is one."""
    if asked is None:
        asked = "cuda" if gpus else "cpu"
    kind, _, index = {"gpu": "cuda"}.get(asked, asked).partition(":")
    if kind == "cpu":
        return kind, None
    if kind != "cuda" or (index and not index.isdigit()):
        raise UsageError(f"device is {asked!r}, it must be 'cpu', 'cuda' or 'cuda:N'")
    return kind, int(index) if index else None


def check_own_parameters(held: Sequence[object], own: Iterable[object]) -> None:
    """An optimizer that holds parameters of another copy of the model would move nothing, without an error."""
    known = set(map(id, own))
    strangers = sum(id(parameter) not in known for parameter in held)
    if strangers:
        raise UsageError(
            f"{strangers} of the optimizer's {len(held)} parameters are not the model's: make it from this model's "
            "parameters(), after any copy or conversion of the model. What else it is to train, such as a learned "
            "temperature, must be a parameter of the model when prepare() is called"
        )

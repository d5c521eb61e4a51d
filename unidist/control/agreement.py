"""All ranks give a value and get those of all: how the answer is read, and what is said when it does not come about."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from unidist.control.protocol import Header
from unidist.errors import CommunicationError, RanksDisagree, RanksMissing

if TYPE_CHECKING:
    from unidist.control.client import Control


def ungathered(header: Header, body: bytes) -> list[bytes]:
    parts, start = [], 0
    for size in header["sizes"]:
        parts.append(body[start : start + size])
        start += size
    return [parts[n] for n in header["of"]]


def gather_error(failure: Mapping[str, Any], where: str) -> CommunicationError:
    """The exception for a gathering that did not come about."""
    match failure["error"]:
        case "missing":
            return RanksMissing(
                f"{name_ranks(failure['missing'])} did not come to {where} within {failure['waited']:.3g} s; "
                f"{name_ranks(map(int, failure['came']))} did. Look at the log of the missing for the cause."
            )
        case "sizes":
            said = failure["said"].items()
            return RanksDisagree("; ".join(f"{' and '.join(who)} said there are {shape} ranks" for shape, who in said))
        case "twice":
            return RanksDisagree(
                f"two processes say they are rank {failure['rank']} ({' and '.join(failure['who'])}): give each its own"
            )
        case "gone":
            return RanksMissing(f"rank {failure['rank']} on {failure['who']} left {where}: {failure['why']}")
        case "differ":
            return RanksDisagree(
                "; ".join(f"{name} differs: {name_values(values)}" for name, values in failure["differ"].items())
            )
    return CommunicationError(f"{where}: {failure['error']}")


def agree(
    control: Control, sequence: int, rank: int, size: int, signature: str, timeout: float, scope: str = ""
) -> None:
    """Return when all ranks have come to their collective number `sequence` with the same `signature`.

    Raises on every rank: `RanksDisagree` saying who wanted what, or `RanksMissing` saying who did not come.
    """
    same = {"operation": signature}
    failure, _ = control.ask(
        "gather", key=f"{scope}agree/{sequence}", rank=rank, size=size, same=same, wait=timeout, patience=timeout
    )
    if failure.get("error") == "missing":
        came = {int(r): wish["operation"] for r, wish in failure["wishes"].items()}
        raise RanksMissing(
            f"{name_ranks(failure['missing'])} did not come to collective {sequence} within {failure['waited']:.3g} s, "
            f"where others wait ({_wishes(came)}). All ranks must make the same calls in the same order: "
            "look for a rank that died or is slow, or a call under `if strategy.is_main`."
        )
    if failure.get("error") == "differ":
        wishes = name_values(failure["differ"]["operation"])
        raise RanksDisagree(f"the ranks want different things in collective {sequence}: {wishes}")
    if "error" in failure:
        raise gather_error(failure, f"collective {sequence}")


def name_ranks(ranks: Iterable[int], role: str = "rank") -> str:
    """ "rank 1", "ranks 0, 2", "ranks 0-6, 9"."""
    ordered = sorted(ranks)
    spans: list[list[int]] = []
    for rank in ordered:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    parts = [f"{s[0]}-{s[-1]}" if len(s) > 2 else ", ".join(map(str, s)) for s in spans]
    return f"{role}{'s' if len(ordered) != 1 else ''} {', '.join(parts) or 'none'}"


def name_values(values: Mapping[str, list[int]]) -> str:
    return "; ".join(f"{name_ranks(ranks)}: {value}" for value, ranks in values.items())


def _wishes(wishes: Mapping[int, str]) -> str:
    groups: dict[str, list[int]] = {}
    for rank, wish in sorted(wishes.items()):
        groups.setdefault(wish, []).append(rank)
    return name_values(groups)

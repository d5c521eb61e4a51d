"""Ranks tell each other what each asks for and what went wrong on it, so that all of them go on or all raise the same.

Everything that one rank may find wrong by itself is told here before it is raised: a rank that left without a word
would let the others wait for it.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable
from typing import Any, TypeVar

from unidist.errors import (
    CheckpointError,
    CommunicationError,
    StateError,
    UnidistError,
    UnsupportedOperation,
    UsageError,
)

T = TypeVar("T")
Gather = Callable[[str, Any], list[Any]]

KINDS = (CheckpointError, UsageError, UnsupportedOperation, StateError)  # each before those that are a kind of it
WORDS = 4000  # characters that a rank says
SHOWN = 8  # ranks that are named one by one


class Agreement:
    """`doing` is what the ranks are about to do, as it goes on after "cannot": "save to out/final". `gather` gives what
    each rank has said. It does not use the engine: some abort, and others hang, when one rank alone calls it."""

    def __init__(self, gather: Gather, rank: int, doing: str) -> None:
        self._gather, self._rank, self._doing = gather, rank, doing

    def on(self, ask: Callable[[], tuple[T, str]]) -> T:
        """What this rank asks for, and the same in words, which must be those of every rank."""

        def sha256(asked: tuple[T, str]) -> str:
            return hashlib.sha256(asked[1].encode(errors="backslashreplace")).hexdigest()

        (asked, words), same = self.each(ask, sha256)
        if not same:
            raise UsageError(f"the ranks do not ask for the same.\n{self._account(words, UsageError)}")
        return asked

    def each(self, act: Callable[[], T], sha256: Callable[[T], str] = lambda _: "") -> tuple[T, bool]:
        """Every rank does this by itself. What fails on one is raised on all, as one type; else what it gave on this
        rank, and whether the `sha256` of it is the same on all."""
        done: list[T] = []
        digest, error = "", None
        try:
            done.append(act())
            digest = sha256(done[0])
        except CommunicationError:
            raise  # the others do not come any more
        except Exception as raised:
            error = raised
        wrong = max((n for n, kind in enumerate(KINDS) if isinstance(error, kind)), default=0) if error else None
        everyones = self._gather("result", {"wrong": wrong, "sha256": digest})
        failed = [answer["wrong"] for answer in everyones if answer["wrong"] is not None]
        if failed:
            kind = KINDS[failed[0]]
            raise kind(self._account(_reason(error) if error else "", kind)) from error
        return done[0], len({answer["sha256"] for answer in everyones}) == 1

    def _account(self, reason: str, kind: type[UnidistError]) -> str:
        """Who says what, each reason once."""
        told = self._gather("reason", {"rank": self._rank, "host": socket.gethostname(), "reason": reason[:WORDS]})
        ranks: dict[str, list[str]] = {}
        for answer in told:
            if answer["reason"]:
                ranks.setdefault(answer["reason"], []).append(f"{answer['rank']} (host {answer['host']})")
        lines = []
        for reason, who in ranks.items():
            more = f" and {len(who) - SHOWN} more" if len(who) > SHOWN else ""
            where = "" if len(who) == len(told) else f" on rank {', '.join(who[:SHOWN])}{more}"
            once = reason.removeprefix(f"cannot {self._doing}: ").removeprefix("cannot save to ")
            lines.append(f"cannot {self._doing}{where}: {once.rstrip('.')}.")
        if self._doing.startswith("load"):
            another = " Correct this, or load another checkpoint." if kind is CheckpointError else ""
            lines.append(f"Nothing was changed on any rank.{another}")
        return "\n".join(lines)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, UnidistError) else f"{type(error).__name__}: {error}"

"""Ranks tell each other what each asks for and what went wrong on it, so that all of them go on or all raise the same.

Everything that one rank may find wrong by itself is told here before it is raised: a rank that left without a word
would let the others wait for it.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from unidist.errors import (
    CheckpointError,
    CommunicationError,
    StateError,
    UnidistError,
    UnsupportedOperation,
    UsageError,
)

if TYPE_CHECKING:
    from unidist.collectives import Collectives

T = TypeVar("T")

KINDS = (CheckpointError, UsageError, UnsupportedOperation, StateError)  # each before those that are a kind of it
WORDS = 4000  # bytes that a rank says
SHOWN = 8  # ranks that are named one by one


class Agreement:
    """`doing` is what the ranks are about to do, as it goes on after "cannot": "save to out/final"."""

    def __init__(self, collectives: Collectives, doing: str) -> None:
        self._collectives, self._doing = collectives, doing

    def on(self, ask: Callable[[], tuple[T, str]]) -> T:
        """What this rank asks for, and the same in words, which must be those of every rank."""
        (asked, words), same = self.each(ask, lambda asked: hashlib.sha256(_encoded(asked[1])).hexdigest())
        if not same:
            told = self._told(_encoded(f"{socket.gethostname()}\n{words}"))
            raise UsageError(f"the ranks do not ask for the same.\n{self._account(told, UsageError)}")
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
        said = b"" if error is None else _encoded(f"{socket.gethostname()}\n{_reason(error)}")
        status = {
            "length": len(said),
            "kind": max((n for n, kind in enumerate(KINDS) if isinstance(error, kind)), default=0),
            "sha256": np.frombuffer(bytes.fromhex(digest).ljust(32, b"\0"), np.uint8),
        }
        everyones = self._collectives.all_gather(status)
        if any(answer["length"] for answer in everyones):
            kind = next(KINDS[answer["kind"]] for answer in everyones if answer["length"])
            raise kind(self._account(self._told(said), kind)) from error
        return done[0], all((answer["sha256"] == everyones[0]["sha256"]).all() for answer in everyones)

    def _told(self, said: bytes) -> list[str]:
        lengths = self._collectives.all_gather(len(said))
        padded = np.frombuffer(said.ljust(max(lengths), b"\0"), np.uint8)
        everyones = zip(self._collectives.all_gather(padded), lengths, strict=True)
        return [each.tobytes()[:length].decode(errors="replace") for each, length in everyones]

    def _account(self, told: list[str], kind: type[UnidistError]) -> str:
        """Who says what, each reason once."""
        ranks: dict[str, list[str]] = {}
        for rank, answer in enumerate(told):
            if answer:
                host, _, reason = answer.partition("\n")
                ranks.setdefault(reason, []).append(f"{rank} (host {host})")
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


def _encoded(text: str) -> bytes:
    return text.encode(errors="backslashreplace")[:WORDS]

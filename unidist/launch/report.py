"""What a person is told when a job ends badly: the first cause, or where each rank hangs."""

from __future__ import annotations

import contextlib
import re
import signal
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from unidist.control import Beat, Cause
from unidist.control.causes import shown
from unidist.control.members import ENDED

# What the survivors say when a peer has gone, beside what their engine's plug-in knows. Their error is real, but it is
# not the cause. (Python's own ConnectionRefusedError and the like come from the script, which may well talk to others
# than its peers.)
_ECHO = (
    r"PeerFailed|RanksMissing|Connection (reset|refused|closed)|Broken ?pipe|closed by (the )?(remote )?peer|"
    "does not answer"
)
_FROM_SCRIPT = re.compile(r"(ConnectionRefused|ConnectionReset|ConnectionAborted|BrokenPipe)Error\b")


HINTS = {
    -signal.SIGKILL: " (by hand, by the system short of memory, or by a limit)",
    -signal.SIGABRT: " (an engine may abort when the ranks call different operations: UNIDIST_DEBUG=1 names them)",
}


def says_that_a_peer_is_gone(lines: Sequence[str], echoes: Sequence[str]) -> bool:
    """`echoes` are phrases of the engine, see `Plugin.echoes`."""
    last, echo = lines[-5:], "|".join([_ECHO, *echoes])
    return not any(map(_FROM_SCRIPT.match, last)) and bool(re.search(echo, "\n".join(last), re.IGNORECASE))


@dataclass(frozen=True)
class Failure:
    """One process that ended badly, with what a person needs to know about it."""

    name: str
    host: str
    code: int | None  # negative: the number of the signal; None: it was still about to end
    lines: Sequence[str]  # the last it printed
    cause: Cause | None = None  # as it told itself, or as its connection did
    echoes: Sequence[str] = ()  # of its engine, see `Plugin.echoes`

    @property
    def exit_code(self) -> int:
        """As a shell counts: 128 + n for signal n. Who left the others alone has failed, whatever it says."""
        return 128 - self.code if self.code and self.code < 0 else self.code or 1

    @property
    def ending(self) -> str:
        if not self.code and self.cause:
            what = ENDED if self.cause.lost else self.cause.what
            return what if self.code is None else f"{what}; exit code 0. To stop early, do so on every rank"
        if self.code is None or self.code >= 0:
            return f"exit code {self.code}"
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-self.code).name}"
        return f"killed by signal {-self.code}"

    @property
    def is_echo(self) -> bool:
        """Whether it looks like the consequence of another's failure."""
        if self.code in (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL):
            return False  # nobody dies so because a peer is gone
        return says_that_a_peer_is_gone(self.lines, self.echoes)

    def __str__(self) -> str:
        hint = HINTS.get(self.code or 0, "")
        head = f"{self.name} on {self.host} failed first: {self.ending}{hint}"
        return "\n".join([head, *(f"    {line}" for line in self._telling)])

    @property
    def _telling(self) -> Sequence[str]:
        if self.cause and (self.cause.lines or (self.code is None and not self.cause.lost)):
            return self.cause.lines  # what it has printed so far has nothing to do with a cause that others found
        lines = [line for line in self.lines if line.strip()]
        starts = [i for i, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
        return lines[starts[-1] :] if starts else lines[-10:]


def failed(first: Failure, others: Sequence[Failure], ended: int) -> str:
    """The summary of a job that failed; `ended` processes went with it that had nothing to do with it."""
    text = str(first)
    if others:
        text += "\n  then failed: " + ", ".join(f"{other.name} ({other.ending})" for other in others)
    if ended:
        text += f"\n  ended with it: {ended} other process{'es' if ended > 1 else ''}"
    return text


def hung(beats: Iterable[Beat], missing: Iterable[str], timeout: float) -> str:
    """Where each rank is when nothing moves any more."""
    beats = sorted(beats, key=lambda beat: (beat.role, beat.rank))
    moving = [beat for beat in beats if beat.waits or not beat.paused]
    front = max((beat.moves for beat in moving), default=0)
    at_front = Counter(beat.operation for beat in moving if beat.moves == front)
    usual = at_front.most_common(1)[0][0] if at_front else ""
    rows = [f"    {beat.role} {beat.rank}: {_where(beat)}{_odd(beat, front, usual)}" for beat in beats]
    rows += [f"    {name}  <- missing" for name in missing]
    if any(beat.waits for beat in beats) and len({beat.operation for beat in beats}) > 1:
        rows.append("    A rank that waits needs the same call from all others: every rank must call the same methods.")
    if not any("<-" in row for row in rows):
        rows.append("    All are in the same place; the stacks that each has printed tell more.")
    return "\n".join([f"no progress for {timeout:g} s (--timeout). Where each rank is:", *rows])


def _where(beat: Beat) -> str:
    how = "paused" if beat.excuses else f"for {beat.stuck:.0f} s"
    return f"step {beat.step}, {'waits in' if beat.waits else 'in'} {shown(beat.operation)}, {how}"


def _odd(beat: Beat, front: int, usual: str) -> str:
    if (beat.paused and not beat.waits) or (beat.moves, beat.operation) == (front, usual):
        return ""
    return "  <- behind the others" if beat.moves < front else "  <- not where the others are"

"""What a person is told when a job ends badly: the first cause, or where each rank hangs."""

from __future__ import annotations

import contextlib
import re
import signal
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from unidist.control import Beat

# What the survivors say when a peer has gone. Their error is real, but it is not the cause. (Python's own
# ConnectionRefusedError and the like come from the script, which may well talk to others than its peers.)
_ECHO = re.compile(
    r"PeerFailed|RanksMissing|Connection (reset|refused|closed)|Broken ?pipe|closed by (the )?(remote )?peer|"
    r"does not answer|Socket closed|recvValue failed|has been shut down",
    re.IGNORECASE,
)
_OWN = re.compile(r"(ConnectionRefused|ConnectionReset|ConnectionAborted|BrokenPipe)Error\b")


@dataclass(frozen=True)
class Failure:
    """One process that ended badly, with what a person needs to know about it."""

    name: str
    host: str
    code: int  # negative: the number of the signal
    lines: Sequence[str]  # the last it printed

    @property
    def exit_code(self) -> int:
        """As a shell counts: 128 + n for signal n."""
        return 128 - self.code if self.code < 0 else self.code

    @property
    def ending(self) -> str:
        if self.code >= 0:
            return f"exit code {self.code}"
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-self.code).name}"
        return f"killed by signal {-self.code}"

    @property
    def is_echo(self) -> bool:
        """Whether it looks like the consequence of another's failure."""
        if self.code in (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL):
            return False  # nobody dies so because a peer is gone
        last = self.lines[-5:]
        return not any(map(_OWN.match, last)) and bool(_ECHO.search("\n".join(last)))

    def __str__(self) -> str:
        hint = " (by hand, by the system short of memory, or by a limit)" if self.code == -signal.SIGKILL else ""
        head = f"{self.name} on {self.host} failed first: {self.ending}{hint}"
        return "\n".join([head, *(f"    {line}" for line in self._telling)])

    @property
    def _telling(self) -> Sequence[str]:
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


def deserted(worker: Failure, others: int) -> str:
    """The summary of a job that one worker has left by an error which its script kept to itself."""
    return (
        f"{worker.name} on {worker.host} left its Strategy because of an error and then ended with exit code 0, while "
        f"{others} other process{'es were' if others > 1 else ' was'} at work. Let the error out of the script, so "
        "that it is shown here; to stop training early, do so on every rank."
    )


def hung(beats: Iterable[Beat], missing: Iterable[str], timeout: float) -> str:
    """Where each rank is when nothing moves any more."""
    beats = sorted(beats, key=lambda beat: (beat.role, beat.rank))
    moving = [beat for beat in beats if not beat.paused]
    front = max((beat.moves for beat in moving), default=0)
    at_front = Counter(beat.operation for beat in moving if beat.moves == front)
    usual = at_front.most_common(1)[0][0] if at_front else ""
    rows = [f"    {beat.role} {beat.rank}: {_where(beat)}{_odd(beat, front, usual)}" for beat in beats]
    rows += [f"    {name}  <- missing" for name in missing]
    if not any("<-" in row for row in rows):
        rows.append("    All are in the same place; the stacks that each has printed tell more.")
    return "\n".join([f"no progress for {timeout:g} s (--timeout). Where each rank is:", *rows])


def _where(beat: Beat) -> str:
    return f"step {beat.step}, in {beat.operation}, " + ("paused" if beat.paused else f"for {beat.stuck:.0f} s")


def _odd(beat: Beat, front: int, usual: str) -> str:
    if beat.paused or (beat.moves, beat.operation) == (front, usual):
        return ""
    return "  <- behind the others" if beat.moves < front else "  <- not where the others are"

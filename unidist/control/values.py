"""What the control server keeps for its clients: values by key, and gatherings of all ranks. No sockets, no threads.

An operation is given a `reply` to call, now or later, with an answer: (header, body). Waiting is a timer of the server.
"""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

Answer = tuple[dict[str, Any], bytes]
Reply = Callable[[dict[str, Any], bytes], None]
Timer = Callable[
    [float, Callable[[], None]], Callable[[], None]
]  # call it after so many seconds; gives a way to cancel

MAX_STORED = 2**30  # bytes of all values
MAX_SIZE = 2**16  # ranks of one gathering
REMEMBERED = 64  # gatherings that ended badly, for those who come late


class Refused(Exception):
    """The request cannot be answered; its sender is told why."""


class Values:
    """Bytes by key, in memory."""

    def __init__(self, later: Timer) -> None:
        self._later = later
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, list[Callable[[], None]]] = {}
        self._stored = 0

    def put(self, key: str, value: bytes) -> None:
        more = len(value) - len(self._values.get(key, b""))
        if self._stored + more > MAX_STORED:
            raise Refused(f"the control plane keeps {MAX_STORED >> 20} MB at most: delete what nobody needs any more")
        self._stored += more
        self._values[key] = value
        for ready in self._waiting.pop(key, ()):
            ready()

    def peek(self, key: str) -> bytes | None:
        return self._values.get(key)

    def get(self, keys: list[str], wait: float, reply: Reply) -> None:
        """Answer with all of them as soon as they are there, or with those that are when the time is over."""
        awaited: str | None = None  # the first of them that is not there

        def look() -> None:
            nonlocal awaited
            awaited = next((key for key in keys if key not in self._values), None)
            if awaited is None:
                cancel()
                answer()
            else:
                self._waiting.setdefault(awaited, []).append(look)

        def answer() -> None:
            found = [self._values.get(key) for key in keys]
            sizes = [-1 if value is None else len(value) for value in found]
            reply({"sizes": sizes}, b"".join(value for value in found if value is not None))

        def too_late() -> None:
            waiting = self._waiting.get(awaited or "", [])
            if look in waiting:
                waiting.remove(look)
                if not waiting:
                    del self._waiting[awaited or ""]
            answer()

        if wait <= 0 or self.held(keys):
            return answer()
        cancel = self._later(wait, too_late)
        look()

    def delete(self, key: str) -> bool:
        value = self._values.pop(key, None)
        self._stored -= len(value or b"")
        return value is not None

    def add(self, key: str, amount: int) -> int:
        try:
            total = int(self._values.get(key, b"0")) + amount
        except ValueError:
            raise Refused(f"the value of {key!r} is no number, so nothing can be added to it") from None
        self.put(key, str(total).encode())
        return total

    def append(self, key: str, value: bytes) -> None:
        self.put(key, self._values.get(key, b"") + value)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """As torch's stores have it: a missing key is set when nothing is expected, else `expected` comes back."""
        present = self._values.get(key)
        if present is None and expected:
            return expected
        if present is None or present == expected:
            self.put(key, desired)
            return desired
        return present

    def count(self, prefix: str) -> int:
        return sum(key.startswith(prefix) for key in self._values)

    def held(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)


class _Gathering:
    def __init__(self, size: int, shape: str, meeting: bool) -> None:
        self.size, self.shape = size, shape  # which is the size as people say it
        self.meeting = meeting  # of the processes themselves
        self.came: dict[int, tuple[bytes, dict[str, str], str]] = {}  # value, what must agree, who
        self.names: list[str] = []  # of those who came
        self.waiting: dict[int, Reply] = {}
        self.answer: Answer | None = None
        self.timers: list[Callable[[], None]] = []


class Gatherings:
    """All ranks give a value and get those of all, in order; or all of them learn what is wrong, and with whom."""

    def __init__(self, later: Timer) -> None:
        self._later = later
        self._open: dict[str, _Gathering] = {}
        self._failed: OrderedDict[str, tuple[float, Answer]] = OrderedDict()  # since when
        self._ended: dict[int, str] = {}  # ranks whose process is over, and where it was

    def join(
        self,
        key: str,
        rank: int,
        size: int,
        value: bytes,
        same: Mapping[str, str],
        who: str,
        wait: float,
        reply: Reply,
        *,
        seats: range | None = None,
        shape: str = "",
        name: str = "",
        meeting: bool = False,
        timeout: float = 0.0,
    ) -> int:
        """`same` is compared over the ranks once all are there; a rank of -1 is given the first free one of `seats`.

        `shape` and `name` are for people: how many of each kind are expected, and who this is; and `timeout`,
        which is `wait` and what has passed of it before. Returns the rank.
        """
        seats, shape, name = seats or range(size), shape or str(size), f"{name or f'rank {rank}'} ({who})"
        if not 1 <= size <= MAX_SIZE or not -1 <= rank < size:
            raise Refused(f"rank {rank} of {size} cannot be: ranks go from 0 to one less than the size")
        if key in self._failed:
            reply(*self._failed[key][1])
            return rank
        gathering = self._open.get(key)
        if gathering is None:
            gathering = self._open[key] = _Gathering(size, shape, meeting)
        if gathering.shape != shape:
            gathering.waiting[-1] = reply
            said = {gathering.shape: gathering.names, shape: [name]}
            self._fail(key, gathering, {"error": "sizes", "said": dict(sorted(said.items()))})
            return rank
        if rank == -1:
            rank = next((r for r in seats if r not in gathering.came), -1)
            if rank == -1:
                reply({"error": "crowded", "seats": list(seats)}, b"")
                return rank
        if rank in gathering.came:
            gathering.waiting[size] = reply
            _, other, who_else = gathering.came[rank]
            differ = _differences({0: other, 1: same})
            self._fail(key, gathering, {"error": "twice", "rank": rank, "who": [who_else, who], "differ": differ})
            return rank
        gathering.came[rank] = (value, dict(same), who)
        gathering.names.append(name)
        gathering.waiting[rank] = reply
        if len(gathering.came) == size:
            self._complete(key, gathering)
        else:
            gathering.timers.append(self._later(wait, lambda: self._give_up(key, gathering, timeout or wait)))
            self._miss_ended(key, gathering)
        return rank

    def end(self, rank: int, who: str) -> None:
        """Its process is over: it will come to no meeting any more."""
        self._ended[rank] = who
        for key, gathering in list(self._open.items()):
            self._miss_ended(key, gathering)

    def _miss_ended(self, key: str, gathering: _Gathering) -> None:
        for rank, who in self._ended.items():
            if gathering.meeting and rank < gathering.size and rank not in gathering.came:
                why = "its process has ended"
                return self._fail(key, gathering, {"error": "gone", "rank": rank, "who": who, "why": why})

    def abandon(self, key: str, rank: int, why: str) -> None:
        """A rank that had come is gone before all were there."""
        gathering = self._open.get(key)
        if gathering is not None and rank in gathering.waiting:
            del gathering.waiting[rank]
            self._fail(key, gathering, {"error": "gone", "rank": rank, "who": gathering.came[rank][2], "why": why})

    @property
    def refused(self) -> bool:
        """One of them did not come about."""
        return bool(self._failed)

    def is_past(self, key: str, age: float) -> bool:
        """Whether this one had failed before a process of this age was started: it comes for another one."""
        return key in self._failed and time.monotonic() - self._failed[key][0] > age

    def close(self) -> None:
        for key, gathering in list(self._open.items()):
            self._fail(key, gathering, {"error": "closing"})

    def _complete(self, key: str, gathering: _Gathering) -> None:
        del self._open[key]
        everyone = [gathering.came[rank] for rank in range(gathering.size)]
        differ = _differences({rank: answer[1] for rank, answer in enumerate(everyone)})
        if differ:
            who = {rank: answer[2] for rank, answer in enumerate(everyone)}
            gathering.answer = {"error": "differ", "differ": differ, "who": who}, b""
        else:
            # Ranks of one host often say the same: with a thousand of them that is worth a table.
            unique = list(dict.fromkeys(value for value, _, _ in everyone))
            number = {value: n for n, value in enumerate(unique)}
            table = {"sizes": [len(value) for value in unique], "of": [number[value] for value, _, _ in everyone]}
            gathering.answer = table, b"".join(unique)
        self._tell(gathering)

    def _give_up(self, key: str, gathering: _Gathering, waited: float) -> None:
        """The first to lose patience settles it for all: who waits longer, or comes later, waits in vain."""
        if gathering.answer is None:
            missing = [rank for rank in range(gathering.size) if rank not in gathering.came]
            came = {rank: who for rank, (_, _, who) in gathering.came.items()}
            wishes = {rank: same for rank, (_, same, _) in gathering.came.items()}
            failure = {"error": "missing", "missing": missing, "came": came, "wishes": wishes, "waited": waited}
            self._fail(key, gathering, failure)

    def _fail(self, key: str, gathering: _Gathering, failure: dict[str, Any]) -> None:
        self._open.pop(key, None)
        gathering.answer = failure, b""
        self._failed[key] = time.monotonic(), gathering.answer
        while len(self._failed) > REMEMBERED:
            self._failed.popitem(last=False)
        self._tell(gathering)

    def _tell(self, gathering: _Gathering) -> None:
        assert gathering.answer is not None
        for rank, reply in gathering.waiting.items():
            header, body = gathering.answer
            with contextlib.suppress(Exception):  # one that cannot be told must not keep the others waiting
                reply({**header, "rank": rank} if "error" not in header else header, body)
        gathering.waiting.clear()
        for cancel in gathering.timers:
            cancel()


def _by_value(said: Mapping[int, str]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for rank, value in sorted(said.items()):
        groups.setdefault(value, []).append(rank)
    return groups


def _differences(said: Mapping[int, Mapping[str, str]]) -> dict[str, dict[str, list[int]]]:
    """Who says nothing about something, such as a server that runs no script, differs from nobody."""
    names = dict.fromkeys(name for same in said.values() for name in same)
    found = {name: _by_value({rank: same[name] for rank, same in said.items() if name in same}) for name in names}
    return {name: values for name, values in found.items() if len(values) > 1}

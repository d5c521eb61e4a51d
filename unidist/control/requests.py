"""What a process that has proven itself may ask of the control server: one operation for each message."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

from unidist.checks import LONGEST_WAIT
from unidist.control.causes import LEFT, Cause
from unidist.control.connection import Connection
from unidist.control.lineage import MOST, Lineage
from unidist.control.protocol import BadInput, Header
from unidist.control.pulses import whole
from unidist.control.roll import Roll
from unidist.control.values import Gatherings, Refused, Reply, Timer, Values


class Requests:
    """Answers them. Nonsense is answered with an error; what is no request at all ends its connection."""

    def __init__(self, later: Timer, push: Callable[[Header], None]) -> None:
        self.values, self.gatherings = Values(later), Gatherings(later)
        self.superseded = False  # somebody came for a meeting after the one that was refused here
        self.roll = Roll(
            later,
            lambda cause: push({"push": "failure", "cause": cause.as_data()}),
            lambda: push({"push": "ended"}),
            lambda: push({"push": "over"}),
        )

    def answer(self, one: Connection, header: Header, body: bytes) -> None:
        name, number = header.get("op"), header.get("id")
        handler = getattr(self, f"_{name}", None) if isinstance(name, str) and name in OPERATIONS else None
        if handler is None or not (number is None or isinstance(number, int)):
            raise BadInput(f"no such operation: {name!r}")

        def reply(answer: dict[str, Any], data: bytes = b"") -> None:
            if number is not None:
                one.send({"id": number, **answer}, data)

        try:
            handler(one, header, body, reply)
        except Refused as refusal:
            reply({"error": "refused", "why": str(refusal)})
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            reply({"error": "refused", "why": f"{type(error).__name__}: {error}"})

    def lost(self, one: Connection) -> None:
        for key, rank in list(one.waits.items()):
            self.gatherings.abandon(key, rank, "its connection ended while it waited for the others")
        self.roll.lose(one.number)

    def close(self) -> None:
        self.gatherings.close()

    # -- values ------------------------------------------------------------------------------------------------

    def _put(self, one: Connection, header: Header, body: bytes, reply: Reply) -> None:
        self.values.put(_key(header), body)
        reply({}, b"")

    def _get(self, one: Connection, header: Header, body: bytes, reply: Reply) -> None:
        self.values.get(_keys(header), _wait(header), reply)

    def _delete(self, one: Connection, header: Header, body: bytes, reply: Reply) -> None:
        reply({"deleted": self.values.delete(_key(header))}, b"")

    def _add(self, one: Connection, header: Header, body: bytes, reply: Reply) -> None:
        reply({"total": self.values.add(_key(header), int(header["amount"]))}, b"")

    def _append(self, one: Connection, header: Header, body: bytes, reply: Reply) -> None:
        self.values.append(_key(header), body)
        reply({}, b"")

    def _compare_set(self, one: Connection, header: Header, body: bytes, reply: Reply) -> None:
        reply({}, self.values.compare_set(_key(header), base64.b64decode(header["expected"]), body))

    def _held(self, one: Connection, header: Header, body: bytes, reply: Reply) -> None:
        reply({"held": self.values.held(_keys(header))}, b"")

    def _count(self, one: Connection, header: Header, body: bytes, reply: Reply) -> None:
        reply({"count": self.values.count(_key(header))}, b"")

    # -- all ranks ---------------------------------------------------------------------------------------------

    def _gather(self, one: Connection, header: Header, body: bytes, reply: Reply) -> None:
        """With `member` the connection is a member of the job from then on, whose loss is everybody's failure."""
        key, rank, size = _key(header), whole(header, "rank"), whole(header, "size")
        if self.gatherings.is_past(key, float(header.get("age", LONGEST_WAIT))):
            self.superseded = True
            return reply({"error": "past"}, b"")
        same = {str(name): str(value) for name, value in header.get("same", {}).items()}
        who = str(header.get("who") or one.host)[:200]
        first, last = header.get("seats") or (0, size)  # of its role
        words = {name: str(header.get(name) or "")[:200] for name in ("shape", "name")}

        space, pids = header.get("lineage") or ("", ())
        lineage = Lineage(str(space)[:200], tuple(int(pid) for pid in pids[:MOST]))

        def met(answer: dict[str, Any], data: bytes) -> None:
            one.waits.pop(key, None)
            if meeting and "error" not in answer:
                role = str(header.get("role", "worker"))[:50]
                self.roll.enter(one.number, key, role, answer["rank"] - first, one.host, lineage)
            reply(answer, data)

        meeting = bool(header.get("member"))
        one.waits[key] = rank
        seats = range(max(0, int(first)), min(size, int(last)))
        rank = self.gatherings.join(
            key,
            rank,
            size,
            body,
            same,
            who,
            _wait(header),
            met,
            seats=seats,
            meeting=meeting,
            timeout=float(header.get("timeout", 0.0)),
            **words,
        )
        if key in one.waits:
            one.waits[key] = rank

    def _withdraw(self, one: Connection, header: Header, body: bytes, reply: Reply) -> None:
        """It does not wait for this gathering any more."""
        if (key := _key(header)) in one.waits:
            self.gatherings.abandon(key, one.waits[key], "it was interrupted there")

    def _beat(self, one: Connection, header: Header, body: bytes, reply: Reply) -> None:
        self.roll.beat(one.number, header)
        reply({}, b"")

    def _leave(self, one: Connection, header: Header, body: bytes, reply: Reply) -> None:
        """No more heartbeats are to be expected of this role and rank."""
        self.roll.pulses.leave(str(header["name"]), str(header.get("how") or LEFT))
        reply({}, b"")

    def _rename(self, one: Connection, header: Header, body: bytes, reply: Reply) -> None:
        self.roll.rename(one.number, whole(header, "rank"))
        reply({}, b"")

    def _goodbye(self, one: Connection, header: Header, body: bytes, reply: Reply) -> None:
        self.roll.goodbye(one.number)
        reply({}, b"")

    def _exits(self, one: Connection, header: Header, body: bytes, reply: Reply) -> None:
        self.roll.exits(one.number, whole(header, "together"))
        reply({}, b"")

    def _gives_up(self, one: Connection, header: Header, body: bytes, reply: Reply) -> None:
        place = whole(header, "together"), bool(header.get("inside"))
        fatal = bool(header.get("fatal"))
        self.roll.gives_up(one.number, place, _cause(header), bool(header["echo"]), fatal, _told(reply))

    def _outlast(self, one: Connection, header: Header, body: bytes, reply: Reply) -> None:
        """Answered when the process may end, with how all of them do."""
        self.roll.outlasts(one.number, whole(header, "code"), lambda how: reply({"how": how}, b""))

    def _first(self, one: Connection, header: Header, body: bytes, reply: Reply) -> None:
        """What failed first, if anything did."""
        self.roll.tell_first(_told(reply))

    def _fails(self, one: Connection, header: Header, body: bytes, reply: Reply) -> None:
        # A process that watches over a member may speak for it, by a connection of its own.
        member = whole(header, "member") if "member" in header else one.number
        self.roll.fails(member, _cause(header), bool(header["echo"]), _told(reply))


OPERATIONS = frozenset(name[1:] for name in vars(Requests) if name.startswith("_") and not name.startswith("__"))


def _told(reply: Reply) -> Callable[[Cause | None], None]:
    return lambda first: reply({"first": None if first is None else first.as_data()}, b"")


def _cause(header: Header) -> tuple[str, tuple[str, ...]]:
    return str(header["what"]), tuple(str(line) for line in header["lines"])


def _key(header: Header) -> str:
    key = header["key"]
    if not isinstance(key, str) or len(key) > 1000:
        raise Refused("a key is a string of at most 1000 characters")
    return key


def _keys(header: Header) -> list[str]:
    return [_key({"key": key}) for key in header["keys"]]


def _wait(header: Header) -> float:
    return min(max(0.0, float(header.get("wait", 0.0))), LONGEST_WAIT)

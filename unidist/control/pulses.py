"""What each process said last of where it is, and for how long it has been there. No sockets, no threads."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from unidist.control.causes import Beat
from unidist.control.values import Refused


class _Pulse(NamedTuple):
    report: dict[str, Any]
    heard: float
    moved: float


class Pulses:
    """By role and rank."""

    def __init__(self) -> None:
        self._pulses: dict[str, _Pulse] = {}

    def beat(self, said: Mapping[str, Any]) -> tuple[str | None, str]:
        """The operation that the process was in when it was heard before, and the one that it is in now."""
        report = {
            "role": _text(said, "role"),
            "rank": whole(said, "rank"),
            "step": whole(said, "step"),
            "operation": _text(said, "operation"),
            "moves": whole(said, "moves"),
            "waits": bool(said.get("waits")),
            "paused": bool(said.get("paused")),
        }
        name, now = f"{report['role']} {report['rank']}", time.monotonic()
        last = self._pulses.get(name)
        # The process counts its moves; a clock of its own would not be comparable with ours.
        busy = report["paused"] and not report["waits"]
        still = last is not None and last.report == report and not busy
        self._pulses[name] = _Pulse(report, now, last.moved if last is not None and still else now)
        return (None if last is None else str(last.report["operation"])), str(report["operation"])

    def leave(self, name: str, how: str) -> None:
        if name in self._pulses:
            self._pulses[name].report.update(operation=how, paused=True, waits=False)

    def beats(self) -> dict[str, Beat]:
        now = time.monotonic()
        return {
            name: Beat(
                **pulse.report,
                silent=now - pulse.heard,
                stuck=0.0 if pulse.report["paused"] and not pulse.report["waits"] else now - pulse.moved,
            )
            for name, pulse in self._pulses.items()
        }


def _text(said: Mapping[str, Any], name: str) -> str:
    value = said.get(name)
    if not isinstance(value, str) or len(value) > 1000:
        raise Refused(f"{name} must be a short text")
    return value


def whole(said: Mapping[str, Any], name: str) -> int:
    value = said.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int):
        raise Refused(f"{name} must be a whole number")
    return value

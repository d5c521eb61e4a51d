"""A process that watches over a rank while OneFlow starts inside of it.

Until OneFlow is up on all ranks its import holds the interpreter's lock: no thread of the rank can hear that another
one has failed, or that it takes too long. The guard hears it on a connection of its own, says so, and kills the rank.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import unidist
from unidist.plugin import CommunicationError, Control, Lifeline, Peers


@contextmanager
def guarded(peers: Peers, timeout: float) -> Iterator[Callable[[], None]]:
    """Gives a function that returns when the guard is there. Where a launcher of ours watches all ranks, the
    guard only watches the time.
    """
    settings = {
        "control": None if peers.launched else peers.control.settings,
        "rank": peers.rank,
        "host": peers.hosts[peers.rank],
        "process": os.getpid(),
        "member": peers.control.number,
        "timeout": timeout,
    }
    folders = [str(Path(path).resolve().parents[1]) for path in (str(unidist.__file__), __file__)]
    code = f"import sys; sys.path[:0] = {folders}; from unidist_oneflow.guard import main; main()"
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is not for it: it ends with the rank
    )
    assert guard.stdin is not None
    answer = guard.stdout
    assert answer is not None

    def ready() -> None:
        if answer.read(1) != b"+":
            raise CommunicationError(
                f"rank {peers.rank} on {settings['host']} could not start the process that watches over OneFlow's "
                "start: its output above says why"
            )

    try:
        guard.stdin.write(json.dumps(settings).encode() + b"\n")
        guard.stdin.flush()
        with _only_the_guard_hears(peers.control):
            yield ready
    finally:
        guard.stdin.close()
        guard.wait()
        answer.close()


@contextmanager
def _only_the_guard_hears(control: Control) -> Iterator[None]:
    """What the rank itself would print is swallowed, as is OneFlow's noise; and one line is enough."""
    heard: list[Any] = []
    on_push, on_loss = control.on_push, control.on_loss
    control.on_push = lambda header: heard.append(partial(on_push, header))
    control.on_loss = lambda why: heard.append(partial(on_loss, why))
    try:
        yield
    finally:
        control.on_push, control.on_loss = on_push, on_loss
        for call in heard:
            call()


def main() -> None:
    """The guard itself: until its input is closed, as it is when OneFlow is up or the rank is gone."""
    with open(0, "rb", buffering=0, closefd=False) as told:  # what follows the line must stay there for `select`
        settings = json.loads(told.readline())
    rank, host, timeout = settings["rank"], settings["host"], settings["timeout"]

    def end(line: str) -> None:
        if not select.select([0], [], [], 0)[0]:
            os.write(2, f"{line}\n".encode())
            os.kill(settings["process"], signal.SIGKILL)
        os._exit(0)

    lifeline: Lifeline | None = None
    if settings["control"]:
        control = Control(**settings["control"]).connect()
        lifeline = Lifeline(control, "worker", rank, host, launched=False, end=end).start()
    os.write(1, b"+")
    if not select.select([0], [], [], timeout)[0]:
        late = f"OneFlow has not started within {timeout:g} s, though all ranks have met"
        if lifeline is not None:  # the other ranks are to hear why this one is killed
            lifeline.fails(TimeoutError(late), member=settings["member"])
        end(f"unidist: CommunicationError: rank {rank} on {host}: {late}")
    os._exit(0)

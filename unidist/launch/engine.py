"""Runs a job on this machine: plan, ports and control plane for each attempt, and nobody left behind.

Two processes share the work. The supervisor parents the job. The guard, which is the command the user started, only
waits: when it dies, of whatever, the supervisor sees a pipe close and ends the job; when the supervisor is killed, the
kernel ends the processes and the guard their children.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from unidist import registry
from unidist.control import ControlServer
from unidist.errors import UnidistError
from unidist.launch import processes as system
from unidist.launch.output import Screen
from unidist.launch.plan import Job, plan
from unidist.launch.ports import Ports
from unidist.launch.supervisor import Outcome, Supervisor


@dataclass(frozen=True)
class Settings:
    """How to run a job, beside the job itself."""

    master_port: int | None = None
    timeout: float | None = None
    grace: float = 5.0
    max_restarts: int = 0
    log_dir: str | None = None
    quiet: bool = False
    master: bool = False


def run(job: Job, settings: Settings, lifeline: int | None = None) -> Outcome:
    """The job to its end, started again after a failure as often as the settings allow."""
    screen = Screen(settings.quiet)
    plugin = registry.plugin(job.backend)
    log_dir = Path(settings.log_dir) if settings.log_dir else None
    if log_dir:
        log_dir.mkdir(parents=True, exist_ok=True)
    causes: list[str] = []
    while True:
        with Ports(job.host) as ports, closing(ControlServer(job.host, token=job.token)) as control:
            attempt = replace(job, ports=choose_ports(job, settings, ports), control=control.url, restart=len(causes))
            outcome = Supervisor(
                plan(attempt, plugin),
                screen,
                grace=settings.grace,
                timeout=settings.timeout,
                beats=control.beats,
                log_dir=log_dir,
                append=bool(causes),
                master=settings.master,
                lifeline=lifeline,
                started=control.start,  # its threads begin after the forks; clients wait in the socket's queue
            ).run()
        if outcome.text:
            screen.say(outcome.text)
        if not outcome.again or len(causes) >= settings.max_restarts:
            break
        causes.append(outcome.text.partition("\n")[0])
        screen.say(f"restart {len(causes)} of {settings.max_restarts}")
    if causes:
        again = "once" if len(causes) == 1 else f"{len(causes)} times"
        screen.say(f"started again {again}, after: " + "; ".join(causes))
    if log_dir and outcome.code:
        screen.say(f"the whole output is in {log_dir}")
    return outcome


def choose_ports(job: Job, settings: Settings, ports: Ports) -> tuple[int, ...]:
    count = Job.ports_needed(job.nproc, job.servers)
    if settings.master_port is None:
        return ports.take(count)
    return (ports.fixed(settings.master_port), *ports.take(count - 1))


def run_guarded(job: Job, settings: Settings) -> int:
    """`run` in a process of its own, watched over by this one. Returns the exit code."""
    sys.stdout.flush()
    sys.stderr.flush()
    reader, writer = os.pipe()
    supervisor = os.fork()
    if supervisor == 0:
        os.close(writer)
        os.setsid()  # Ctrl-C reaches us through the guard, once; a signal to the guard's group does not take us along
        _child(lambda: run(job, settings, reader).code)
    os.close(reader)
    try:
        return guard(supervisor, job.token)
    finally:
        os.close(writer)


def guard(supervisor: int, token: str) -> int:
    """Wait for the supervisor, pass signals on to it, and clean up after it should it be killed."""

    forwarded = set()

    def forward(number: int, _: object) -> None:
        forwarded.add(number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(supervisor, number)

    before = {number: signal.signal(number, forward) for number in system.stopping_signals()}
    try:
        _, status = os.waitpid(supervisor, 0)
    finally:
        for number, handler in before.items():
            # Whoever presses Ctrl-C once more has been heard: it must not spoil our way out.
            signal.signal(number, signal.SIG_IGN if number in forwarded else handler)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        end_all(token)
        print(f"unidist: the supervisor was killed by signal {-code}; its processes were ended", file=sys.stderr)
        return 128 - code
    return code


def end_all(token: str) -> None:
    """Kill whatever carries the job's token: the last resort, when its supervisor is gone."""
    until = time.monotonic() + 5.0
    while (left := system.carrying(f"UNIDIST_TOKEN={token}")) and time.monotonic() < until:
        system.kill(left, signal.SIGKILL)
        time.sleep(0.02)


def _child(body: Callable[[], int]) -> None:
    """Run `body` in a forked child and never return into the parent's stack."""
    code = 1
    try:
        code = body()
    except UnidistError as error:
        print(f"unidist run: {error}", file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)

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
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from unidist import registry
from unidist.control import ControlServer
from unidist.errors import LaunchError, UnidistError
from unidist.launch import processes as system
from unidist.launch.plan import Job, plan
from unidist.launch.ports import Ports
from unidist.launch.screen import Screen
from unidist.launch.signals import Signals
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
    with Signals() as signals, Ports(job.host) as kept:
        fixed = fixed_ports(settings, kept)  # held between the attempts, too
        return _attempts(job, settings, fixed, signals, lifeline)


def _attempts(job: Job, settings: Settings, fixed: Sequence[int], signals: Signals, lifeline: int | None) -> Outcome:
    screen = Screen(settings.quiet)

    def say(text: str) -> None:
        heard = len(signals.received)

        def hopeless() -> bool:
            """Nobody reads us, and whoever started us has gone, or does not want to wait."""
            signals.read()
            return len(signals.received) > heard or (lifeline is not None and system.closed(lifeline))

        screen.say(text, hopeless)

    plugin = registry.plugin(job.backend)
    log_dir = _log_dir(settings.log_dir)
    causes: list[str] = []
    while True:
        with Ports(job.host) as ports, closing(_control(job)) as control:
            numbers = choose_ports(job, fixed, ports)
            attempt = replace(job, ports=numbers, control=control.url, restart=len(causes))
            outcome = Supervisor(
                plan(attempt, plugin),
                screen,
                signals,
                grace=settings.grace,
                timeout=settings.timeout,
                beats=control.beats,
                causes=control.causes,
                verdict=control.verdict,
                worker_ended=control.worker_ended,
                echoes=plugin.echoes,
                log_dir=log_dir,
                append=bool(causes),
                master=settings.master,
                lifeline=lifeline,
                started=control.start,  # its threads begin after the forks; clients wait in the socket's queue
            ).run()
        if outcome.text:
            say(outcome.text)
        if not outcome.again or signals.received or len(causes) >= settings.max_restarts:
            break
        causes.append(outcome.text.partition("\n")[0])
        say(f"restart {len(causes)} of {settings.max_restarts}")
    if causes:
        again = "once" if len(causes) == 1 else f"{len(causes)} times"
        say(f"started again {again}, after: " + "; ".join(causes))
    if log_dir and outcome.code:
        say(f"the whole output is in {log_dir}")
    return outcome


def _log_dir(name: str | None) -> Path | None:
    if name is None:
        return None
    try:
        Path(name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"--log-dir {name}: {error.strerror}") from None
    return Path(name)


def _control(job: Job) -> ControlServer:
    try:
        return ControlServer(job.host, token=job.token)
    except OSError as error:
        raise LaunchError(
            f"--master-addr {job.host}: cannot listen there ({error.strerror}); it must be an address of this machine"
        ) from None


def fixed_ports(settings: Settings, ports: Ports) -> list[int]:
    return [] if settings.master_port is None else [ports.fixed(settings.master_port)]


def choose_ports(job: Job, fixed: Sequence[int], ports: Ports) -> tuple[int, ...]:
    return (*fixed, *ports.take(Job.ports_needed(job.nproc, job.servers) - len(fixed)))


def run_guarded(job: Job, settings: Settings) -> int:
    """`run` in a process of its own, watched over by this one. Returns the exit code."""
    for fd, stream in ((1, sys.stdout), (2, sys.stderr)):
        if stream:
            stream.flush()
        else:  # started with `>&-`: what we open next must not be taken for it
            os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
    system.adopt_orphans()
    reader, writer = os.pipe()
    # Held back until there is somebody on both sides to answer them.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, system.stopping_signals())
    supervisor = os.fork()
    if supervisor == 0:
        os.close(writer)
        os.setsid()  # Ctrl-C reaches us through the guard, once; a signal to the guard's group does not take us along
        system.rename(f"supervisor of process {os.getppid()}")  # who kills by the name of unidist kills the guard only
        _child(lambda: run(job, settings, reader).code)
    os.close(reader)
    try:
        return guard(supervisor, before)
    finally:
        os.close(writer)


def guard(supervisor: int, mask: Iterable[int]) -> int:
    """Wait for the supervisor, pass signals on to it, and clean up after it should it be killed."""

    forwarded = set()

    def forward(number: int, _: object) -> None:
        forwarded.add(number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(supervisor, number)

    before = {number: signal.signal(number, forward) for number in system.stopping_signals()}
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        _, status = os.waitpid(supervisor, 0)
    finally:
        for number, handler in before.items():
            # Whoever presses Ctrl-C once more has been heard: it must not spoil our way out.
            signal.signal(number, signal.SIG_IGN if number in forwarded else handler)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        system.kill_descendants()  # the orphans are ours now
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
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)

"""`unidist.launch`: a Python function on fresh processes, from a script or a notebook.

Imported with `unidist` itself, so everything heavy is imported inside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, TextIO

loading = False  # in a process of a job, while the caller's script is loaded for its functions


def launch(
    fn: Callable[..., Any],
    nproc: int = 2,
    backend: str | None = None,
    args: Sequence[Any] = (),
    *,
    timeout: float | None = None,
    quiet: bool = False,
    standalone: bool = False,
    **options: Any,
) -> list[Any]:
    """Run `fn(*args)` on `nproc` fresh processes and return what each gave back, by rank.

    The processes are those of `unidist run --backend …`: `Strategy()` inside `fn` finds its place. `options` are the
    backend's. `timeout` ends the job when a rank makes no progress for so many seconds; `quiet` shows worker 0 only.
    `standalone` trains here alone, also where srun or a pod says that this process is one of several.

    A function of a module or script is found there by name (a script needs the usual `if __name__ == "__main__":`); one
    that was typed into a notebook, a lambda or a closure travels by cloudpickle. When a rank fails, all are ended, and
    `LaunchError` tells the first cause.
    """
    import json
    import os
    import secrets
    import sys
    import tempfile
    from dataclasses import asdict
    from pathlib import Path

    from unidist import registry
    from unidist.errors import LaunchError
    from unidist.launch import carry, environments, outer
    from unidist.launch.engine import Settings
    from unidist.launch.plan import Job
    from unidist.launch.processes import cores

    if loading:
        raise LaunchError(
            'the script calls launch() again when it is loaded: put that under if __name__ == "__main__":'
        )
    _check(fn, nproc, args, timeout, {"quiet": quiet, "standalone": standalone})
    if not standalone:
        outer.refuse_several(os.environ, sys.argv[0] or "the script", "call launch(…, standalone=True)")
    plugin, _ = environments.choose(backend)
    registry.build_options(plugin, options)
    python, variables = environments.interpreter_for(plugin.name)
    if "OMP_NUM_THREADS" not in os.environ:
        variables["OMP_NUM_THREADS"] = str(max(1, cores() // nproc))
    with tempfile.TemporaryDirectory(prefix="unidist-launch-") as name:
        directory = Path(name)
        carry.pack(fn, tuple(args), directory, python)
        job = Job(
            backend=plugin.name,
            python=python,
            command=(python, "-m", "unidist.launch.carry", name),
            nproc=nproc,
            options=options,
            token=secrets.token_hex(16),
            env=variables,
        )
        spec = json.dumps({"job": asdict(job), "settings": asdict(Settings(timeout=timeout, quiet=quiet))})
        code, text = _supervise(spec, job.token, variables)
        if code != 0:
            raise LaunchError(text or f"the job ended with exit code {code}")
        return [carry.result(directory, rank) for rank in range(nproc)]


def _check(fn: object, nproc: object, args: object, timeout: object, flags: Mapping[str, object]) -> None:
    """Before anything is started."""
    from unidist import checks
    from unidist.errors import UsageError

    if not callable(fn):
        raise UsageError(f"launch() takes a function as its first argument, not {fn!r}")
    checks.check_whole("nproc", nproc, 1)
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        raise UsageError(f"args is {args!r}, it must be a tuple or list of the function's arguments, such as (5,)")
    if timeout is not None:
        checks.check_positive("timeout", timeout)
    for name, value in flags.items():
        checks.check_flag(name, value)


def _supervise(spec: str, token: str, variables: dict[str, str]) -> tuple[int, str]:
    """Run the job under a supervisor of its own; (exit code, summary).

    Not in this process: it may have threads, children and signal handlers of its own. Its output comes through
    `sys.stdout`, which in a notebook is not file 1.
    """
    import os
    import signal
    import subprocess
    import sys

    from unidist.launch.engine import end_all

    supervisor = subprocess.Popen(
        [sys.executable, "-m", "unidist.launch.supervised"],
        stdin=subprocess.PIPE,  # the job, and then our lifeline: it closes when we die
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": variables["PYTHONPATH"]},
        start_new_session=True,  # Ctrl-C comes to us, and we end it
    )
    assert supervisor.stdin
    assert supervisor.stdout
    assert supervisor.stderr
    summary: list[bytes] = []

    def show(line: bytes, stream: TextIO) -> None:
        if summary or line.startswith(b"unidist: "):  # it ends with the summary, which goes into the error
            summary.append(line)
        else:
            stream.write(line.decode(errors="replace") + "\n")
            stream.flush()

    try:
        supervisor.stdin.write(spec.encode() + b"\n")
        supervisor.stdin.flush()
        streams = {supervisor.stdout: sys.stdout, supervisor.stderr: sys.stderr}
        try:
            _pump(streams, show)
        except KeyboardInterrupt:
            supervisor.send_signal(signal.SIGINT)
            _pump(streams, show)
            raise
    finally:
        supervisor.stdin.close()
        code = supervisor.wait()
        if code < 0:
            end_all(token)
        supervisor.stdout.close()
        supervisor.stderr.close()
    text = b"\n".join(summary).decode(errors="replace").removeprefix("unidist: ")
    return (code if code >= 0 else 128 - code), text


def _pump(streams: Mapping[IO[bytes], TextIO], show: Callable[[bytes, TextIO], None]) -> None:
    """Whole lines, until each stream ends."""
    import os
    import selectors

    pending = dict.fromkeys(streams, b"")
    with selectors.DefaultSelector() as selector:
        for source in streams:
            selector.register(source, selectors.EVENT_READ, source)
        while selector.get_map():
            for key, _ in selector.select():
                data = os.read(key.fd, 1 << 16)
                *lines, pending[key.data] = (pending[key.data] + data).split(b"\n")
                for line in lines:
                    show(line, streams[key.data])
                if not data:
                    selector.unregister(key.fd)

"""`unidist run`: from the command line to a `Job` and `Settings`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from unidist import registry
from unidist.backend import Plugin
from unidist.errors import LaunchError, UsageError
from unidist.launch import environments, outer
from unidist.launch.engine import Settings, choose_ports, fixed_ports, run_guarded
from unidist.launch.plan import Job, Process, describe, plan, totals
from unidist.launch.ports import Ports
from unidist.launch.processes import cores, gpus

EXAMPLES = """\
examples:
  unidist run --backend torch --nproc 2 train.py --epochs 3     everything after the script is the script's
  unidist run --nproc auto -m package.train                     one process for each GPU (or core), a module
  unidist run --backend mxnet --nproc 2 --servers 1 --option kvstore=dist_async train.py
  unidist run --backend oneflow --machine 10.0.0.1,10.0.0.2 --ctrl-port 9988 train.py       the same on both nodes
  unidist run --nproc 2 --max-restarts 3 --log-dir logs train.py
  unidist run --nproc 2 --timeout 60 train.py                   end the job when a step takes a minute
  unidist run --nproc 2 --dry-run train.py                      show the processes, start none

Every line that a process prints is shown with its name in front. When one fails, the others are ended, the first
cause is shown, and its exit code is ours (128 + n for signal n).
"""

# torchrun's words for what is always so here, or makes no difference on one machine.
RENDEZVOUS = ("rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "local-addr")
NOT_NEEDED = (*RENDEZVOUS, "role", "monitor-interval", "start-method", "redirects", "tee", "local-ranks-filter")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Start a training script on several processes of this machine."
    parser.epilog = EXAMPLES
    parser.usage = "unidist run [--backend B] [--nproc N] [options] script.py [arguments of the script]"
    add = parser.add_argument
    add("-b", "--backend", help=f"{', '.join(registry.names())}; see `unidist backends`")
    add(
        "-n", "--nproc", *_spellings("nproc-per-node"), default="1", metavar="N", help="workers, or `auto` (default: 1)"
    )
    add("--servers", type=_count, default=0, metavar="M", help="parameter servers, for backends that have them")
    add("-o", "--option", action="append", default=[], metavar="K=V", help="an option of the backend, also as `--k V`")
    add("-m", "--module", action="store_true", help="the script is the name of a module, as in `python -m`")
    add(*_spellings("max-restarts"), type=_count, default=0, metavar="N", help="start the job again after a failure")
    add(*_spellings("log-dir"), metavar="DIR", help="also write the output of each process to a file there")
    add("--timeout", type=_seconds, metavar="S", help="end the job when a rank makes no progress for S seconds")
    add("--grace", type=_seconds, default=5.0, metavar="S", help="seconds between SIGTERM and SIGKILL (default: 5)")
    add("-q", "--quiet", action="store_true", help="show worker 0 only")
    add("--label-master", action="store_true", help="call worker 0 `[master]`")
    # An option with an optional value would swallow the script, so each form is a flag.
    add("--dry-run", "--dry-run=table", dest="dry_run", action="store_const", const="table", help="show the plan only")
    add("--dry-run=json", dest="dry_run", action="store_const", const="json", help="the same as JSON")
    add(*_spellings("master-addr"), default="127.0.0.1", metavar="A", help="where rank 0 listens (default: 127.0.0.1)")
    add(*_spellings("master-port"), type=_port, metavar="P", help="a fixed port (default: one that is free)")
    add("--interface", metavar="IF", help="network interface for the engine, such as eth0")
    add("--nccl-debug", metavar="LEVEL", help="NCCL_DEBUG: VERSION, WARN, INFO or TRACE")
    add("--nccl-ib-disable", action="store_true", help="NCCL_IB_DISABLE=1: no InfiniBand")
    add("--standalone", action="store_true", help="train here alone, also where srun or a pod says that there are more")
    # torchrun's words for what is always so here, or is not yet: taken, so that a command line can be carried over.
    add("--nnodes", default="1", help=argparse.SUPPRESS)
    add(*_spellings("node-rank"), type=int, help=argparse.SUPPRESS)
    for name in NOT_NEEDED:
        add(*_spellings(name), help=argparse.SUPPRESS)
    _add_backend_options(parser)
    # One list: argparse would lose a `--` between two.
    add("command", nargs=argparse.PARSER, metavar="script.py", help="the script to run, and its arguments")


class _BackendOption(argparse.Action):
    """`--ctrl-port 9988` is `--option ctrl_port=9988`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        namespace.option = [*namespace.option, f"{self.dest}={values}"]


def _add_backend_options(parser: argparse.ArgumentParser) -> None:
    """Users of an engine know its words: each backend's options are flags too, where the name is not taken."""
    for backend in registry.names():
        with contextlib.suppress(Exception):  # one that cannot be loaded says why when it is asked for
            for field in fields(registry.plugin(backend).options):
                spellings = _spellings(field.name.replace("_", "-"))
                if not any(spelling in parser._option_string_actions for spelling in spellings):
                    parser.add_argument(
                        *spellings,
                        action=_BackendOption,
                        dest=field.name,
                        default=argparse.SUPPRESS,
                        help=argparse.SUPPRESS,
                    )


def run(args: argparse.Namespace) -> int:
    plugin, why = environments.choose(args.backend)
    if args.node_rank is not None and any(field.name == "node_rank" for field in fields(plugin.options)):
        args.option, args.node_rank = [*args.option, f"node_rank={args.node_rank}"], None  # the backend's own word, too
    _check_torchrun(args)
    options = parse_options(plugin, args.option)
    registry.build_options(plugin, options)  # a misspelt one ends here, before anything starts
    nproc = _nproc(args.nproc)
    script, *arguments = args.command[1:] if args.command[0] == "--" else args.command
    if not args.module and not os.path.exists(script):
        raise UsageError(f"there is no file {script!r} in {os.getcwd()}; to run a module: -m NAME")
    python, variables = environments.interpreter_for(plugin.name)
    threads = None if "OMP_NUM_THREADS" in os.environ else max(1, cores() // nproc)
    job = Job(
        backend=plugin.name,
        python=python,
        command=(python, *(["-m"] if args.module else []), script, *arguments),
        nproc=nproc,
        servers=args.servers,
        options=options,
        host=_address(args.master_addr),
        token=secrets.token_hex(16),
        env={**variables, **_network(args, plugin), **({"OMP_NUM_THREADS": str(threads)} if threads else {})},
    )
    settings = Settings(
        master_port=args.master_port,
        timeout=args.timeout,
        grace=args.grace,
        max_restarts=args.max_restarts,
        log_dir=args.log_dir,
        quiet=args.quiet,
        master=args.label_master,
    )
    # What cannot be planned is refused before anything is said.
    processes = plan(replace(job, ports=(0,) * Job.ports_needed(nproc, args.servers)), plugin)
    if not args.standalone and all(process.env["UNIDIST_NUM_NODES"] == "1" for process in processes):
        named = f"-m {script}" if args.module else script
        outer.refuse_several(os.environ, named, "add --standalone to train on this machine alone")
    if args.dry_run:
        return _show(job, settings, plugin, args.dry_run)
    if not args.quiet:
        said = f"; OMP_NUM_THREADS={threads} in each, for {cores()} cores (set it to change that)" if threads else ""
        chosen = "" if args.backend else f" ({why})"
        print(f"unidist: {plugin.name}{chosen} on {nproc} worker{'s' * (nproc > 1)}{said}", file=sys.stderr, flush=True)
    return run_guarded(job, settings)


def parse_options(plugin: Plugin, pairs: Sequence[str]) -> dict[str, Any]:
    """`key=value` pairs. A value is JSON where it can be, except where the option is a string."""
    types = {field.name: field.type for field in fields(plugin.options)}
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise UsageError(f"--option {pair}: write it as name=value")
        options[name.replace("-", "_")] = value
        if types.get(name.replace("-", "_")) not in (str, "str", "str | None"):
            with contextlib.suppress(ValueError):  # then it is a plain string
                options[name.replace("-", "_")] = json.loads(value)
    return options


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 up")
    return int(text)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if float(text) > 0:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")


def _port(text: str) -> int | None:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 1 to 65535, or 0 for one that is free")
    return int(text) or None


def _spellings(name: str) -> tuple[str, ...]:
    """torchrun takes both, and so do we."""
    return tuple(dict.fromkeys((f"--{name}", f"--{name.replace('-', '_')}")))


def _check_torchrun(args: argparse.Namespace) -> None:
    if args.nnodes not in ("1", "1:1") or args.node_rank:
        raise UsageError(
            f"--nnodes {args.nnodes} --node-rank {args.node_rank or 0}: `unidist run` starts the processes of one "
            "machine. Across machines start the script with torchrun, srun, mpirun or horovodrun: unidist finds its "
            "place there."
        )
    given = [f"--{name}" for name in NOT_NEEDED if getattr(args, name.replace("-", "_"))]
    if given:
        print(f"unidist: {', '.join(given)} not needed here, not used", file=sys.stderr)


def _nproc(text: str) -> int:
    if text in ("auto", "gpu", "cpu"):
        devices = gpus() if text != "cpu" else 0
        if text == "gpu" and not devices:
            raise LaunchError("--nproc gpu: no GPU is visible (CUDA_VISIBLE_DEVICES, nvidia-smi)")
        return devices or cores()
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"--nproc {text}: give a number of processes from 1 up, or `auto`")
    return int(text)


def _address(name: str) -> str:
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise UsageError(f"--master-addr {name}: {error}") from None


def _network(args: argparse.Namespace, plugin: Plugin) -> dict[str, str]:
    env = {}
    if args.interface:
        known = [name for _, name in socket.if_nameindex()]
        if args.interface not in known:
            raise UsageError(f"--interface {args.interface}: this machine has {', '.join(known)}")
        if not plugin.interface_variables:
            raise UsageError(f"--interface {args.interface}: backend {plugin.name!r} cannot be told which one to use")
        env.update(dict.fromkeys(plugin.interface_variables, args.interface))
    if args.nccl_debug:
        env["NCCL_DEBUG"] = args.nccl_debug
    if args.nccl_ib_disable:
        env["NCCL_IB_DISABLE"] = "1"
    return env


def _show(job: Job, settings: Settings, plugin: Plugin, form: str) -> int:
    with Ports(job.host) as ports:
        numbers = choose_ports(job, fixed_ports(settings, ports), ports)
        processes = plan(replace(job, ports=numbers, control=f"tcp://{job.host}:(chosen at start)"), plugin)
    print(json.dumps(describe(processes), indent=2) if form == "json" else _table(processes))
    return 0


def _table(processes: Sequence[Process]) -> str:
    """One row for each process; what they have in common is listed once, below."""
    shown = [(process, {k: v for k, v in process.env.items() if k != "UNIDIST_TOKEN"}) for process in processes]
    common = dict(set.intersection(*(set(env.items()) for _, env in shown)))
    rows = [
        ("PROCESS", "HOST", "COMMAND"),
        *((process.name, process.host, " ".join(process.command)) for process, _ in shown),
    ]
    width, *_ = widths = [max(len(row[i]) for row in rows) for i in range(2)]
    lines = [f"{name:<{widths[0]}}  {host:<{widths[1]}}  {command}" for name, host, command in rows]
    lines += ["", "each process has in its environment:"]
    for process, env in shown:
        variables = " ".join(f"{name}={value}" for name, value in sorted(env.items()) if name not in common)
        lines.append(f"  {process.name:<{width}}  {variables}")
    lines += [f"  {'all':<{width}}  {name}={value}" for name, value in sorted(common.items())]
    if taken := totals(processes):
        lines += ["", f"in total: {taken}"]
    return "\n".join(lines)

"""What a tired person is told when the ranks do not come together, and what to do about it."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterable, Mapping
from typing import Any

from unidist import network
from unidist.control.client import NotOurs
from unidist.control.company import Roster
from unidist.control.places import Note, Place
from unidist.errors import CommunicationError, RanksDisagree, RanksMissing, WorldError
from unidist.world import World

# What to do about a difference, by what differs.
ADVICE = {
    "the script": "Copy it to every host again, and start the same file everywhere.",
    "the backend": "Name the same one for every process.",
    "the options": "Give every process the same.",
}
OTHERWISE = "Install the same version on every host."


def refusal(failure: Mapping[str, Any], where: str, world: World, roster: Roster, hint: str) -> CommunicationError:
    """The exception for a meeting that did not come about."""
    match failure["error"]:
        case "missing":
            return _missing(failure, where, world, roster, hint)
        case "twice":
            first, second = failure["who"]
            where_from = f"on {first} and on {second}" if first != second else f"both on {first}"
            twice = f"two processes say they are {roster.names([failure['rank']])}, {where_from}"
            if failure["differ"]:
                texts = []
                for name, values in failure["differ"].items():
                    said = "; ".join(f"{value} on {failure['who'][n]}" for value, (n, *_) in values.items())
                    texts.append(f"{name} differs: {said}.")
                return RanksDisagree(f"{twice}, and were not started alike: {_with_advice(texts, failure['differ'])}")
            return RanksDisagree(
                f"{twice}: give each process a rank of its own (RANK, or rank=), and see that no process of an earlier "
                "start is still running"
            )
        case "gone":
            return RanksMissing(
                f"{roster.names([failure['rank']])} on {failure['who']} ended while the ranks were meeting at {where}: "
                "see its log"
            )
        case "sizes":
            said = "; ".join(f"{shape} on {' and '.join(who)}" for shape, who in failure["said"].items())
            return RanksDisagree(
                f"the number of processes differs: {said}. Start as many as they are told there are, and tell all of "
                "them the same number."
            )
        case "crowded":
            return RanksDisagree(
                f"{roster.names(failure['seats'])} came to {where} already, and here is one more {roster.role}: start "
                "as many as they are told there are, and see that none of an earlier start is still running"
            )
        case "differ":
            return RanksDisagree(_differences(failure["differ"], failure["who"], roster))
    return CommunicationError(f"the ranks could not meet at {where}: {failure.get('why', failure['error'])}")


def _missing(failure: Mapping[str, Any], where: str, world: World, roster: Roster, hint: str) -> RanksMissing:
    came = {int(rank): host for rank, host in failure["came"].items()}
    missing, waited = failure["missing"], failure["waited"]  # the timeout of the first to lose patience
    of = f" of {world.world_size}" if roster.only_workers else ""
    hint = f" {hint}" * any(seat >= world.world_size for seat in missing)
    return RanksMissing(
        f"{roster.names(missing)}{of} did not come to {where} within {waited:g} s; {_on_hosts(came, roster)} did. "
        "Was each process started, with the same address and port, and do all see the same number of processes? Look "
        f"at the log of the missing.{hint}{_hint(world)}"
    )


def _hint(world: World) -> str:
    """What may be wrong with the master's address, as seen from here."""
    if world.master_addr is None:
        return ""
    if network.is_loopback(world.master_addr):
        return f" The master's address here is {world.master_addr}, by which no other host finds this one."
    try:
        network.resolve(world.master_addr)
    except OSError:
        return f" This host, {socket.gethostname()}, cannot resolve the master's address {world.master_addr!r}."
    return ""


def _differences(differ: Mapping[str, Mapping[str, list[int]]], who: Mapping[str, str], roster: Roster) -> str:
    hosts = {int(rank): host for rank, host in who.items()}
    texts = []
    for name, values in differ.items():
        said = "; ".join(
            f"{value} on {_on_hosts({rank: hosts.get(rank, '') for rank in ranks}, roster)}"
            for value, ranks in values.items()
        )
        texts.append(f"{name} differs: {said}.")
    return f"the processes were not started alike: {_with_advice(texts, differ)}"


def _with_advice(texts: list[str], differ: Iterable[str]) -> str:
    return " ".join([*texts, *dict.fromkeys(ADVICE.get(name, OTHERWISE) for name in differ)])


def _on_hosts(ranks: Mapping[int, str], roster: Roster) -> str:
    by_host: dict[str, list[int]] = {}
    for rank, host in ranks.items():
        by_host.setdefault(host, []).append(rank)
    return " and ".join(roster.names(on_host) + (f" ({host})" if host else "") for host, on_host in by_host.items())


def waiting(world: World, where: str, trouble: Exception | None, name: str, host: str) -> str:
    if trouble is None:
        return f"{name} waits at {where} for the others"
    return f"{name} is not at {where} yet: {_why(trouble, world, host)}"


def unreachable(
    world: World, where: str, timeout: float, trouble: Exception | None, note: Note | None, name: str, host: str
) -> CommunicationError | WorldError:
    """It never came to the meeting."""
    if note is not None and isinstance(trouble, FileNotFoundError):
        return WorldError(
            f"{name} waited {timeout:g} s for {note.path}, which rank 0 writes: see whether rank 0 was started, and "
            f"{note.advice}"
        )
    if isinstance(trouble, socket.gaierror):
        return WorldError(f"{name} could not meet the others within {timeout:g} s: {_why(trouble, world, host)}")
    return CommunicationError(
        f"{name} could not meet the others at {where} within {timeout:g} s: {_why(trouble, world, host)}"
    )


def _why(trouble: Exception | None, world: World, host: str) -> str:
    here, port = socket.gethostname(), world.port_variable
    if isinstance(trouble, NotOurs):
        return {
            "secret": "who answers there holds another secret, so it is another job, or UNIDIST_SECRET differs between "
            "processes: set the same for all of one job",
            "job": f"another unidist job meets there: choose another {port}",
            "generation": "the processes are at different Strategies: each must open and close as many as the others",
            "silent": f"a program there accepts connections and says nothing, so it is not {host} of this job: choose "
            f"another {port}, or end that program",
            "foreign": f"another program has that port: choose another {port}",
            "closed": "who listens there closes every connection: it is another program, or a proxy without one",
        }.get(trouble.code, str(trouble))
    if isinstance(trouble, socket.gaierror):
        return (
            f"the master's address is {world.master_addr!r}, which {here} cannot resolve ({trouble.strerror}). Give "
            f"the IP address of {host}, or a name that every host knows"
        )
    if isinstance(trouble, TimeoutError):
        return (
            f"no answer comes back from {world.master_addr} to {here}: is the address right, is that host up, and does "
            "a firewall let the port through?"
        )
    if isinstance(trouble, OSError) and trouble.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return f"no way leads from {here} to {world.master_addr} ({trouble.strerror}): correct the address of {host}"
    if isinstance(trouble, ConnectionError):
        hint = ""
        if world.master_addr and network.is_loopback(world.master_addr):
            hint = f", and is {host} on this host? {world.master_addr} is always the own host"
        return f"nobody listens there: was {host} started, and is this its address{hint or '?'}"
    return str(trouble) if trouble else f"{host} was not heard of"


def nowhere(world: World) -> str:
    return (
        f"{world.source} does not say where rank 0 is: set MASTER_ADDR and MASTER_PORT for every process, "
        "or start with `unidist run`"
    )


# -- who hosts -------------------------------------------------------------------------------------------------------


def where_to_listen(world: World, place: Place) -> tuple[str, bool]:
    """The address to bind ("" is all of them), and whether other hosts may have to be let in after a while.

    A master that knows itself by a loopback address only may well be known to the others by another: Kubeflow's
    operators say localhost to the master's pod, and a host's own name often stands for 127.0.1.1 in its /etc/hosts.
    """
    try:
        address = network.resolve(place.host)
    except OSError:
        return "", False  # the others may know the name; if not, they say so
    if not network.is_loopback(address):
        return (address if network.is_own(address) else ""), False  # a mapped port of a container is not its own
    if world.placed and world.num_nodes == 1:
        return address, False
    if network.is_loopback(place.host) and place.host != "localhost":
        return address, False
    pod = world.source == "kubeflow" or "KUBERNETES_SERVICE_HOST" in os.environ
    everywhere = pod or bool(place.secret) or place.host != "localhost" or (world.placed and world.num_nodes > 1)
    return ("", False) if everywhere else (address, True)


def cannot_listen(world: World, place: Place, error: OSError, name: str) -> WorldError:
    from unidist.launch.ports import holder

    who = f": {holder(place.ports[0])}" if error.errno == errno.EADDRINUSE else ""
    return WorldError(
        f"{name} cannot listen at {place} on {socket.gethostname()} ({error.strerror}){who}. Choose another "
        f"{world.port_variable}, the same for every process."
    )


def unguarded(bound: str, port: int, widen: bool) -> str:
    if network.is_loopback(bound) and not widen:
        who = f"any user of this machine can connect to the job's meeting at {bound}:{port}"
    else:
        where = "any address of this host" if bound in ("0.0.0.0", "::") or widen else bound
        who = f"anyone who reaches {where}, port {port}, can connect to the job's meeting"
    return f"no secret is set, so {who}; set UNIDIST_SECRET or UNIDIST_SECRET_FILE for all processes to close it"

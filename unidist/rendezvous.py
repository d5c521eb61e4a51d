"""The file:// rendezvous: ranks that share only a file system meet, without any framework, and see who sits where.

Rank 0 opens a control server and writes its address into the file; the others find it there and report. So all
know, before an engine starts, that everyone is there, on which hosts, and whether loopback will do. The file is
gone when they have met, or rank 0 gave up; only a killed rank 0 leaves it behind, and that is told apart.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from unidist.control import Control, ControlServer
from unidist.errors import CommunicationError, RanksDisagree, RanksMissing, StaleRendezvous, WorldError


@dataclass(frozen=True)
class Meeting:
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    master_addr: str
    master_port: int


def meet(path: str, rank: int, size: int, timeout: float) -> Meeting:
    """Wait for all ranks. Every one gets the same answer, but for its own place in it."""
    address = outward_address()
    host = f"{socket.gethostname()} ({address})"  # with the address, since many machines are called localhost
    me: dict[str, Any] = {"host": host, "address": address}
    everyone = _host(path, size, me, timeout) if rank == 0 else _join(path, rank, size, me, timeout)
    hosts = list(dict.fromkeys(one["host"] for one in everyone))
    neighbours = [r for r, one in enumerate(everyone) if one["host"] == host]
    return Meeting(
        local_rank=neighbours.index(rank),
        local_world_size=len(neighbours),
        node_rank=hosts.index(host),
        num_nodes=len(hosts),
        master_addr=everyone[0]["address"] if len(hosts) > 1 else "127.0.0.1",
        master_port=everyone[0]["port"],
    )


def outward_address() -> str:
    """The address under which other hosts would reach this one, as far as it can know; else loopback."""
    with contextlib.suppress(OSError):
        named = socket.gethostbyname(socket.gethostname())
        if not named.startswith("127."):
            return named
    # Connecting a datagram socket sends nothing; it only asks the routing table for the address to send from.
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    return "127.0.0.1"


def _host(path: str, size: int, me: dict[str, Any], timeout: float) -> list[dict[str, Any]]:
    # The engine's port stays bound until all have met, so that nobody else is given it meanwhile.
    with ControlServer(me["address"]) as server, socket.socket() as reserved:
        reserved.bind(("", 0))
        me = me | {"port": reserved.getsockname()[1]}
        note = {"addr": me["address"], "port": server.port, "host": me["host"], "pid": os.getpid()}
        _create(path, note | {"time": time.time(), "job": server.token})
        control = Control(server.url, server.token)
        try:
            return _gather(control, path, 0, size, me, timeout)
        finally:
            os.unlink(path)
            control.close()


def _join(path: str, rank: int, size: int, me: dict[str, Any], timeout: float) -> list[dict[str, Any]]:
    until = time.monotonic() + timeout
    while (note := _read(path)) is None:
        if time.monotonic() > until:
            raise WorldError(
                f"rank {rank} waited {timeout:g} s for {path}, which rank 0 writes: see whether rank 0 was started, "
                "and whether both see the same file system"
            )
        time.sleep(0.05)
    same_host = note["host"] == me["host"]
    if same_host and not _alive(note["pid"]):
        raise _stale(path, note, "has ended")
    if not same_host and note["addr"].startswith("127."):
        raise WorldError(
            f"{path} says that rank 0 on {note['host']} knows no address of its own but {note['addr']}, which "
            f"{me['host']} cannot reach: use init='tcp://<address of rank 0>:<port>'"
        )
    control = Control(f"http://{note['addr']}:{note['port']}", note["job"])
    try:
        return _gather(control, path, rank, size, me, max(1.0, until - time.monotonic()))
    except (RanksMissing, RanksDisagree):
        raise
    except CommunicationError as error:
        raise _stale(path, note, "does not answer") from error
    finally:
        control.close()


def _gather(
    control: Control, path: str, rank: int, size: int, me: dict[str, Any], timeout: float
) -> list[dict[str, Any]]:
    return control.gather(f"the meeting at {path}", rank, size, me, timeout)


def _create(path: str, note: dict[str, Any]) -> None:
    """Write the file so that it is never seen half-written, nor overwrites another."""
    folder = os.path.dirname(path)
    try:
        # mkstemp's file is readable only by its owner: the job's token is in it.
        handle, draft = tempfile.mkstemp(prefix=f".{os.path.basename(path)}.", dir=folder)
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(note, file)
            os.link(draft, path)
        finally:
            os.unlink(draft)
    except FileExistsError:
        other = _read(path)
        if other is None:
            raise WorldError(f"{path} has just been used by another job: choose another name for this one") from None
        if other["host"] != note["host"]:
            raise _stale(path, other, "may have ended") from None
        raise _stale(path, other, "is still running" if _alive(other["pid"]) else "has ended") from None
    except OSError as error:
        raise WorldError(
            f"rank 0 cannot write {path} ({error.strerror}): choose a folder that exists, is writable, "
            "and is seen by all ranks"
        ) from error


def _read(path: str) -> dict[str, Any] | None:
    try:
        with open(path) as file:
            note = json.load(file)
        return {key: note[key] for key in ("addr", "port", "host", "pid", "time", "job")}
    except FileNotFoundError:
        return None
    except OSError as error:
        raise WorldError(f"cannot read the rendezvous file {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError):
        raise StaleRendezvous(
            f"{path} is there already, and is not a rendezvous of unidist's: delete it or choose another name"
        ) from None


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it is another user's
    return True


def _stale(path: str, note: dict[str, Any], what: str) -> StaleRendezvous:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(note["time"]))
    return StaleRendezvous(
        f"{path} was written by process {note['pid']} on {note['host']} at {when}, which {what}: "
        "delete the file if that job is over, or choose another name"
    )

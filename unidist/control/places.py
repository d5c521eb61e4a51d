"""Where the ranks of a job meet, the secret that they share, and the note of a file:// rendezvous."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unidist import network
from unidist.control.client import Control
from unidist.errors import StaleRendezvous, UsageError, WorldError
from unidist.world import World

FIELDS = {"address": str, "port": int, "secret": str, "host": str, "node": str, "pid": int, "time": float}
MOST_TEXT = 2**16  # of a note
PORTS_TO_TRY = 8  # behind one that belongs to somebody else, such as torchrun


@dataclass(frozen=True)
class Place:
    """An address as the ranks were told it, and the ports there among which rank 0 takes the first that is free."""

    host: str
    ports: tuple[int, ...]
    job: str  # tells this job's meeting from another's behind a neighbouring port
    secret: str

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        if len(self.ports) == 1:
            return f"{host}:{self.ports[0]}"
        return f"{host}, ports {self.ports[0]} to {self.ports[-1]}"


def place_of(world: World, env: Mapping[str, str] = os.environ) -> Place | None:
    """Where the ranks of this world meet; None when its launcher does not say."""
    if world.master_addr is None or world.master_port is None:
        return None
    port = world.master_port
    ports: tuple[int, ...] = (port,)
    if world.port_taken:
        step = 1 if port + PORTS_TO_TRY < 65536 else -1
        ports = tuple(port + step * n for n in range(1, PORTS_TO_TRY + 1))
    run = [env.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")]
    return Place(world.master_addr, ports, " ".join(["port", str(port), *filter(None, run)]), secret(env))


def secret(env: Mapping[str, str] = os.environ) -> str:
    """What processes that were started by hand share; empty when the user has not chosen one."""
    given, path = env.get("UNIDIST_SECRET", ""), env.get("UNIDIST_SECRET_FILE", "")
    if given and path:
        raise UsageError("UNIDIST_SECRET and UNIDIST_SECRET_FILE are both set: keep one")
    if not path:
        return given
    try:
        with open(path) as file:
            _check_owner(file.fileno(), path, "UNIDIST_SECRET_FILE", private=True)
            given = file.read(4096).strip()
    except OSError as error:
        raise UsageError(f"UNIDIST_SECRET_FILE is {path!r}, which cannot be read ({error.strerror})") from None
    if not given:
        raise UsageError(f"UNIDIST_SECRET_FILE is {path!r}, which is empty: write a secret into it")
    return given


def _check_owner(fd: int, path: str, what: str, private: bool) -> None:
    found = os.fstat(fd)
    if found.st_uid not in (os.getuid(), 0):
        raise WorldError(
            f"{what} {path} belongs to user {found.st_uid}, not to you ({os.getuid()}): whoever owns it could send "
            "this process anywhere. Use a file of your own, in a folder where others cannot put one."
        )
    if private and stat.S_IMODE(found.st_mode) & 0o077:
        raise WorldError(f"{what} {path} can be read or written by others: chmod 600 it")


def connect_from_env(env: Mapping[str, str] | None = None) -> Control | None:
    """The control plane of `unidist run`, if that started us."""
    env = os.environ if env is None else env
    url, token = env.get("UNIDIST_CONTROL"), env.get("UNIDIST_TOKEN")
    if not url:
        return None
    if not token:
        raise WorldError(
            f"UNIDIST_CONTROL is {url!r}, but UNIDIST_TOKEN is not set: set both, as `unidist run`, or none"
        )
    return Control(url, token)


# -- file:// ---------------------------------------------------------------------------------------------------------


class Note:
    """The file by which ranks that share only a file system find rank 0: it holds an address and a secret."""

    advice = "whether both see the same file system"  # what to look at where there is none
    secret: str | None = None  # where others could read the note, one that is known from elsewhere

    def __init__(self, path: str) -> None:
        self.path = path

    def own_address(self) -> str:
        """Where the other ranks may reach rank 0."""
        return network.outward_address()

    def content(self, port: int, secret: str) -> dict[str, Any]:
        who = {"pid": os.getpid(), "host": socket.gethostname(), "node": network.identity(), "time": time.time()}
        return {"address": self.own_address(), "port": port, "secret": secret, **who}

    def write(self, port: int, secret: str) -> None:
        """So that it is never seen half-written, nor overwrites another."""
        note = self.content(port, secret)
        try:
            # mkstemp's file is readable only by its owner.
            handle, draft = tempfile.mkstemp(prefix=f".{os.path.basename(self.path)}.", dir=os.path.dirname(self.path))
            try:
                with os.fdopen(handle, "w") as file:
                    json.dump(note, file)
                os.link(draft, self.path)
            finally:
                os.unlink(draft)
        except FileExistsError:
            other = self.read()
            if other is None:
                raise WorldError(
                    f"{self.path} has just been used by another job: choose another name for this one"
                ) from None
            if other["node"] != note["node"]:
                raise self.stale(other, "may have ended") from None
            raise self.stale(other, "is still running" if _alive(other["pid"]) else "has ended") from None
        except OSError as error:
            raise WorldError(
                f"rank 0 cannot write {self.path} ({error.strerror}): choose a folder that exists, is writable, "
                "and is seen by all ranks"
            ) from error

    def read(self) -> dict[str, Any] | None:
        try:
            with open(self.path) as file:
                found = self.understood(file.read(MOST_TEXT))
                _check_owner(file.fileno(), self.path, "the rendezvous file", private=True)
            return found
        except FileNotFoundError:
            return None
        except OSError as error:
            raise WorldError(f"cannot read the rendezvous file {self.path}: {error.strerror}") from error

    def understood(self, text: str | bytes) -> dict[str, Any]:
        try:
            note = json.loads(text)
            return {key: kind(note[key]) for key, kind in FIELDS.items()}
        except (ValueError, KeyError, TypeError):
            raise StaleRendezvous(
                f"{self.path} is there already, and is not a rendezvous of unidist's: delete it or choose another name"
            ) from None

    def place(self, note: Mapping[str, Any]) -> Place:
        """Where the writer of the note is to be found. Only a killed rank 0 leaves its note behind."""
        here = note["node"] == network.identity()
        if here and not _alive(note["pid"]):
            raise self.stale(note, "has ended")
        if not here and network.is_loopback(note["address"]):
            raise WorldError(
                f"{self.path} says that rank 0 on {note['host']} knows no address of its own but {note['address']}, "
                f"which {socket.gethostname()} cannot reach: use init='tcp://<address of rank 0>:<port>'"
            )
        return Place("127.0.0.1" if here else note["address"], (note["port"],), self.path, note["secret"])

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self.path)

    def stale(self, note: Mapping[str, Any], what: str) -> StaleRendezvous:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(note["time"]))
        return StaleRendezvous(
            f"{self.path} was written by process {note['pid']} on {note['host']} at {when}, which {what}: "
            "delete the file if that job is over, or choose another name"
        )


def note_of(world: World) -> Note | None:
    """Where rank 0 says how to reach it, if its address is not known."""
    if world.note is None or not world.note.startswith("http://"):
        return Note(world.note) if world.note else None
    from unidist.control.posted import PostedNote  # it takes an HTTP client, which others should not pay for

    note = PostedNote(world.note, world.port_variable)
    return note if note.served() else None


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass  # it is another user's
    return True

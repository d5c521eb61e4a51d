"""Where Horovod's processes find each other: a key-value server over plain HTTP, as its client wants it.

horovodrun brings one. Otherwise rank 0 runs this one, on the address where the others expect it, until all have met.
Whoever can reach the port could read or write there, as with horovodrun: so it listens on that address only, and for
those moments only.
"""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer

from unidist.errors import CommunicationError, RanksMissing

LOOK_EVERY = 0.05  # seconds


class Rendezvous(ThreadingTCPServer):
    """`with Rendezvous(host, port):` serves GET (404 while missing), PUT and DELETE of /scope/key."""

    allow_reuse_address = True  # `unidist run` keeps the port bound for us
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, host: str, port: int) -> None:
        super().__init__((host, port), _Handler)
        self.values: dict[str, bytes] = {}
        self._thread = threading.Thread(target=self.serve_forever, args=(LOOK_EVERY,), daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, *_: object) -> None:
        """A client that went away: it says so itself."""


class _Handler(BaseHTTPRequestHandler):
    server: Rendezvous

    def do_GET(self) -> None:
        value = self.server.values.get(self.path)
        self._answer(404 if value is None else 200, value or b"")

    def do_PUT(self) -> None:
        self.server.values[self.path] = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer(200)

    def do_DELETE(self) -> None:
        self._answer(200)  # a client has finished; its peers may still be reading

    def _answer(self, code: int, body: bytes = b"") -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def is_served(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return False
    return True


def wait_until_served(host: str, port: int, timeout: float) -> None:
    """Horovod's own client gives up after a second and a half."""
    if not _within(timeout, lambda: is_served(host, port)):
        raise CommunicationError(
            f"nobody answers at {host}:{port}, where the ranks of Horovod are to meet, within {timeout:g} s. Is rank 0 "
            "started, is the address that of its host (or of horovodrun's), and is the port free there?"
        )


def tell_everyone(host: str, port: int, rank: int, size: int, word: str, timeout: float) -> list[str]:
    """What each rank says, by rank."""
    until = time.monotonic() + timeout
    wait_until_served(host, port, timeout)
    _request(host, port, "PUT", f"/unidist/{rank}", word.encode())
    heard: dict[int, str] = {}

    def all_there() -> bool:
        for each in range(size):
            if each not in heard and (body := _request(host, port, "GET", f"/unidist/{each}")) is not None:
                heard[each] = body.decode()
        return len(heard) == size

    if not _within(max(0.0, until - time.monotonic()), all_there):
        missing = ", ".join(str(each) for each in range(size) if each not in heard)
        raise RanksMissing(f"rank {missing} of {size} did not come to {host}:{port} within {timeout:g} s: see its log")
    return [heard[each] for each in range(size)]


def _request(host: str, port: int, method: str, path: str, body: bytes | None = None) -> bytes | None:
    connection = http.client.HTTPConnection(host, port, timeout=10.0)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        value = answer.read()
        return value if answer.status == 200 else None
    except (OSError, http.client.HTTPException) as error:
        raise CommunicationError(
            f"{host}:{port} is no meeting place of Horovod ({error}): does another program have that port? "
            "Choose another with MASTER_PORT."
        ) from error
    finally:
        connection.close()


def _within(seconds: float, true: Callable[[], bool]) -> bool:
    until = time.monotonic() + seconds
    while not true():
        if time.monotonic() > until:
            return False
        time.sleep(LOOK_EVERY)
    return True

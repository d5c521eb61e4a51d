"""The key-value server over HTTP that Horovod's native client needs at its start, for this one process.

Horovod trusts whoever answers there, and its servers trust whoever asks. So each rank has one of its own, on loopback
and for the moments of the start only; the values travel between ranks over the job's authenticated control plane. The
client sends no password, but it asks for what it was told as the address: that holds a secret, and who does not know it
is given nothing.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any

from unidist.plugin import CommunicationError, Peers

MOST_BYTES = 2**20  # of one value: the addresses of this rank for all others, some 150 bytes each
MOST_VALUES = 64  # of this rank: it has one in each of three groups
WAIT = 0.5  # seconds for a value of another rank; Horovod asks again, and looks at its own clock between
STRANGERS = 32  # connections that have not shown the secret; more push out the oldest
LOOK_EVERY = 0.02  # seconds


class Store(ThreadingTCPServer):
    """`with Store(peers) as store:` serves GET (404 while missing), PUT and DELETE of scope/key below its secret."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, peers: Peers) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.control, self._peers = peers.control, peers
        self.secret = secrets.token_hex(16)
        self.values: dict[str, bytes] = {}  # those that were read before: they do not change
        self.written = 0
        self._guard = threading.Lock()
        self._strangers: list[socket.socket] = []
        self._thread = threading.Thread(target=self.serve_forever, args=(LOOK_EVERY,), daemon=True)
        self._thread.start()

    @property
    def variables(self) -> dict[str, str]:
        """As Horovod makes http://address:port/scope/key of them."""
        port = self.server_address[1]
        return {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": f"127.0.0.1:{port}/{self.secret}",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        }

    def key(self, path: str) -> str | None:
        """What a request is about, if it knows the secret."""
        begin = f"/{self.secret}:{self.server_address[1]}/"
        known = hmac.compare_digest(path[: len(begin)].encode(), begin.encode())
        return self._peers.key(f"horovod/{path[len(begin) :]}") if known else None

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._guard:
            self._strangers.append(request)
            if len(self._strangers) > STRANGERS:
                with contextlib.suppress(OSError):
                    self._strangers.pop(0).shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def no_stranger(self, request: Any) -> None:
        with self._guard, contextlib.suppress(ValueError):
            self._strangers.remove(request)

    def shutdown_request(self, request: Any) -> None:
        self.no_stranger(request)
        super().shutdown_request(request)

    def handle_error(self, *_: object) -> None:
        """A client that went away: it says so itself."""

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Store
    timeout = 10.0

    def do_GET(self) -> None:
        key = self._key()
        if key is None:
            return
        if key not in self.server.values:
            value = self.server.control.get(key, WAIT)
            if value is None:
                return self._answer(404)
            self.server.values[key] = value
        self._answer(200, self.server.values[key])

    def do_PUT(self) -> None:
        key = self._key()
        if key is None:
            return
        size = self.headers.get("Content-Length", "")
        if not size.isdecimal() or int(size) > MOST_BYTES or self.server.written >= MOST_VALUES:
            return self._answer(413)
        self.server.written += 1
        self.server.control.put(key, self.rfile.read(int(size)))
        self._answer(200)

    def do_DELETE(self) -> None:
        if self._key() is not None:
            self._answer(200)  # this rank has finished; its peers may still be reading

    def _key(self) -> str | None:
        key = self.server.key(self.path)
        if key is None:
            self._answer(403)
        else:
            self.server.no_stranger(self.connection)
        return key

    def handle(self) -> None:
        with contextlib.suppress(CommunicationError):  # Horovod asks again; the lifeline says what is wrong
            super().handle()

    def _answer(self, code: int, body: bytes = b"") -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass

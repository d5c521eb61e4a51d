"""The note by which ranks find rank 0 where their launcher keeps values for them over HTTP, as horovodrun does.

It is as open as the launcher's server: whoever reaches that can read it, and write another. So a secret that the user
has given to all ranks stays out of it.
"""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

from unidist import network
from unidist.control.places import MOST_TEXT, Note, secret
from unidist.errors import WorldError

PATIENCE = 3.0  # seconds for one request: the launcher has started its server before the ranks


class PostedNote(Note):
    """`path` is the address of the key."""

    advice = "whether the launcher's server there still runs"

    def __init__(self, path: str, port_variable: str) -> None:
        super().__init__(path)
        self._port_variable = port_variable
        url = urlsplit(path)
        self._host, self._port, self._key = url.hostname or "", url.port or 0, url.path
        self.secret = secret() or None

    def served(self) -> bool:
        """Whether such a server answers; where the variables were set by hand, nobody does yet."""
        return self._request("GET") is not None

    def own_address(self) -> str:
        """All ranks reach the launcher's host, so they also reach what faces it."""
        return network.address_towards(self._host)

    def write(self, port: int, secret: str) -> None:
        note = self.content(port, secret if self.secret is None else "")
        answer = self._request("PUT", json.dumps(note).encode())
        if answer is None or answer[0] != 200:
            raise WorldError(
                f"rank 0 cannot tell the others where it is at {self.path}, where the launcher keeps values for its "
                f"ranks ({f'it answers {answer[0]}' if answer else 'it does not answer'}): another program may have "
                f"that port. Start with the launcher again, or choose another {self._port_variable}."
            )

    def read(self) -> dict[str, Any] | None:
        answer = self._request("GET")
        if answer is None or answer[0] != 200 or not answer[1]:
            return None
        note = self.understood(answer[1])
        return note if self.secret is None else note | {"secret": self.secret}

    def remove(self) -> None:
        self._request("PUT")  # empty: not every such server deletes

    def _request(self, method: str, body: bytes = b"") -> tuple[int, bytes] | None:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=PATIENCE)
        try:
            connection.request(method, self._key, body)
            answer = connection.getresponse()
            return answer.status, answer.read(MOST_TEXT)
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

"""All that the ranks say to each other: everybody's bytes, for everybody, by way of rank 0."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from unidist.plugin import PeerFailed, World


class Wire:
    def __init__(self, world: World, nodelay: bool, timeout: float) -> None:
        self._rank, self._sockets = world.rank, {}
        if world.peers is None:  # this process is alone
            return
        with self._translated("meeting"), socket.socket() as listener:
            listener.settimeout(timeout)
            listener.bind((world.peers.address, 0))
            listener.listen(world.world_size)
            # The ranks have met already, and what they say there is for them alone: the word keeps strangers out.
            card = [*listener.getsockname(), secrets.token_hex(8)]
            address, port, word = world.peers.gather("wire", card, timeout)[0]
            if self._rank:
                self._sockets[0] = socket.create_connection((address, port), timeout)
                self._sockets[0].sendall(f"{word} {self._rank:6}".encode())
            while self._rank == 0 and len(self._sockets) < world.world_size - 1:
                connection, _ = listener.accept()
                connection.settimeout(timeout)
                said, _, rank = connection.recv(23, socket.MSG_WAITALL).decode(errors="replace").partition(" ")
                if secrets.compare_digest(said.encode(), word.encode()):
                    self._sockets[int(rank)] = connection
        for connection in self._sockets.values():
            connection.settimeout(None)  # from here on unidist watches the ranks, and ends those that wait for the dead
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, nodelay)

    def all_gather(self, mine: bytes) -> list[bytes]:
        """The bytes of all ranks, by rank. They have one length on all of them."""
        with self._translated("an exchange"):
            if self._rank:
                self._sockets[0].sendall(mine)
                everything = self._receive(0, len(mine) * int.from_bytes(self._receive(0, 4), "big"))
            else:
                others = [self._receive(rank, len(mine)) for rank in sorted(self._sockets)]
                everything = b"".join([mine, *others])
                for connection in self._sockets.values():
                    connection.sendall((len(others) + 1).to_bytes(4, "big") + everything)
        return [everything[start : start + len(mine)] for start in range(0, len(everything), len(mine))]

    def _receive(self, rank: int, length: int) -> bytes:
        parts = bytearray()
        while len(parts) < length:
            part = self._sockets[rank].recv(length - len(parts))
            if not part:
                raise ConnectionError(f"rank {rank} has closed its connection")
            parts += part
        return bytes(parts)

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise PeerFailed(f"rank {self._rank} lost another rank in {what}: {error}") from error

    def close(self) -> None:
        for connection in self._sockets.values():
            connection.close()

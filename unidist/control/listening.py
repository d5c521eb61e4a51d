"""The port that all ranks meet at, taken by the one that hosts the meeting."""

from __future__ import annotations

import socket
import time

from unidist.control import troubles
from unidist.control.places import Place
from unidist.control.protocol import bind
from unidist.world import World


def listen(world: World, place: Place, patience: float, name: str) -> tuple[list[socket.socket], bool]:
    """The listening socket, and whether other hosts may have to be let in later."""
    address, widen = troubles.where_to_listen(world, place)
    until = time.monotonic() + patience
    while True:
        failure: OSError | None = None
        for port in place.ports:
            try:
                return [bind(address, port)], widen
            except OSError as error:
                failure = failure or error
        if failure is not None and time.monotonic() > until:
            raise troubles.cannot_listen(world, place, failure, name) from None
        time.sleep(0.05)

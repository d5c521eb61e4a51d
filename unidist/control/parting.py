"""The end of a script that has not closed its Strategy, for engines whose own way out waits for the other ranks.

how = all_at_their_end(peers)      in an atexit handler, which runs after the lifeline's
"""

from __future__ import annotations

from unidist.checks import LONGEST_WAIT
from unidist.control import ending
from unidist.control.causes import Cause
from unidist.control.lifeline import end_process, say
from unidist.control.peers import Peers
from unidist.control.protocol import Header
from unidist.errors import CommunicationError


def all_at_their_end(peers: Peers) -> str:
    """Wait for all ranks, and return how they end: "exits", or "gave up" if one of them did so. Where one of them
    fails, now or after that, this process ends with it: nobody else listens any more."""
    peers.control.on_push = _end_with_the_first
    peers.control.on_loss = lambda why: _end_saying(f"rank {peers.rank} has lost the others ({why})")
    try:
        how = outlast(peers, 0)
    except CommunicationError:  # another has failed, and was named
        how = "failed"
    if how == "failed":
        end_process(ending.code() or 1)
    return how


def outlast(peers: Peers, code: int) -> str:
    """How the ranks end, when all are there: see `Roll.outlasts`."""
    return str(peers.control.ask("outlast", code=code, patience=LONGEST_WAIT)[0]["how"])


def _end_with_the_first(header: Header) -> None:
    if header["push"] == "failure":
        _end_saying(str(Cause.from_data(header["cause"])))


def _end_saying(why: str) -> None:
    say(f"unidist: {why}")
    end_process(ending.code() or 1)

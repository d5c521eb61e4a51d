"""The control plane: one small authenticated service for what ranks must say outside their engine.

A `ControlServer` runs beside the launcher, or beside rank 0 when something else launched the job; every process holds
a `Control`. Over it the ranks meet and agree before their engine starts (`meeting`), exchange values, tell where they
are (`Heart`), and learn why another has failed (`lifeline`). `protocol` describes what travels.
"""

from unidist.control.agreement import agree
from unidist.control.causes import GAVE_UP, LEFT, Beat, Cause
from unidist.control.client import Control, NotOurs
from unidist.control.heartbeat import Heart
from unidist.control.places import connect_from_env
from unidist.control.protocol import MAX_BODY
from unidist.control.server import ControlServer

__all__ = [
    "GAVE_UP",
    "LEFT",
    "MAX_BODY",
    "Beat",
    "Cause",
    "Control",
    "ControlServer",
    "Heart",
    "NotOurs",
    "agree",
    "connect_from_env",
]

"""What the tests of the control plane share: a server, a client, and calls that are made at once.

PYTEST_DONT_REWRITE: the tests import it before pytest takes its fixtures.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from unidist.control import Control, ControlServer
from unidist.errors import CommunicationError


@pytest.fixture
def no_thread_stays() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@pytest.fixture
def server() -> Iterator[ControlServer]:
    with ControlServer() as server:
        yield server


@pytest.fixture
def control(server: ControlServer) -> Iterator[Control]:
    control = Control(server.url, server.token)
    yield control
    control.close()


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Call all at once, each in a thread; an exception is given back in place of the result."""

    def one(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except CommunicationError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(one, calls))


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until, "it never happened"
        time.sleep(0.005)

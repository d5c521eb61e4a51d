"""The fixture `hosts`: three hosts for the tests of a module; skipped, with the reason, where they cannot be made."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hosts import Hosts, why_not


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if reason := why_not():
        pytest.skip(reason)
    with Hosts(tmp_path_factory.mktemp("hosts"), 3) as made:
        yield made

"""torch's key-value store on the connection that the ranks have met on: it needs no port and knows no strangers."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from unidist.plugin import Peers


class MeetingStore(dist.Store):  # type: ignore[misc]  # torch is not there to be checked
    """Process groups exchange their addresses here. `timeout` bounds how long another rank may take."""

    def __init__(self, peers: Peers, timeout: float) -> None:
        super().__init__()
        self._control, self._scope = peers.control, f"{peers.scope}/torch/"
        self._longest = timeout

    def set(self, key: str, value: Any) -> None:
        self._control.put(self._scope + key, _raw(value))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        found = self._control.get_all([self._scope + key for key in keys], self._longest)
        missing = [key for key, value in zip(keys, found, strict=True) if value is None]
        if missing:
            raise dist.DistStoreError(f"no rank has set {missing[0]!r} within {self._longest:g} s")
        return [value for value in found if value is not None]

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        longest = self._longest if timeout is None else min(self._longest, timeout.total_seconds())
        found = self._control.get_all([self._scope + key for key in keys], longest)
        if None in found:
            raise dist.DistStoreError(f"no rank has set {keys[found.index(None)]!r} within {longest:g} s")

    def add(self, key: str, amount: int) -> int:
        return self._control.add(self._scope + key, amount)

    def append(self, key: str, value: Any) -> None:
        self._control.append(self._scope + key, _raw(value))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return self._control.compare_set(self._scope + key, _raw(expected), _raw(desired))

    def check(self, keys: list[str]) -> bool:
        return self._control.held([self._scope + key for key in keys])

    def delete_key(self, key: str) -> bool:
        return self._control.delete(self._scope + key)

    def num_keys(self) -> int:
        return self._control.count(self._scope)

    def set_timeout(self, timeout: timedelta) -> None:
        self._longest = timeout.total_seconds()

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> MeetingStore:
        return self


def _raw(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)

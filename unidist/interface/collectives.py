"""Values that all ranks exchange, and work that one does before the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from unidist.checks import is_whole
from unidist.errors import PeerFailed, UsageError
from unidist.interface.process import Process


class CollectiveCalls(Process):
    def all_reduce(self, value: Any, op: str = "mean") -> Any:
        """`value` combined over all ranks: "mean", "sum", "min" or "max"; same kind, shape and nesting as given."""
        self._require_open()
        return self._collectives.all_reduce(value, op)

    def all_gather(self, value: Any) -> list[Any]:
        """A list with the value of each rank, by rank; shapes must be the same on all of them."""
        self._require_open()
        return self._collectives.all_gather(value)

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """The value of rank `source`, on every rank; the others pass something of the same shape."""
        self._require_open()
        if not is_whole(source, 0, self.world_size - 1):
            raise UsageError(f"source is {source!r}, ranks go from 0 to {self.world_size - 1}")
        return self._collectives.broadcast(value, source)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self._require_open()
        self._collectives.barrier()

    @contextmanager
    def main_first(self, local: bool = False) -> Iterator[None]:
        """Rank 0 (with `local`, the first process of each node) runs the block, then all the others do.

        For a download or a cache that is made once. When the first one raises, the others raise `PeerFailed`.
        """
        self._require_open()
        first = (self.local_rank if local else self.rank) == 0
        with self._watch.paused("main_first"):
            if first:
                error: BaseException | None = None
                try:
                    yield
                except BaseException as raised:
                    error = raised
                self._collectives.all_reduce(int(error is not None), "max")  # releases the others in either case
                if error is not None:
                    raise error
            else:
                if self._collectives.all_reduce(0, "max"):
                    who = "the first process of a node" if local else "rank 0"
                    raise PeerFailed(f"{who} raised inside main_first(): see its error")
                yield

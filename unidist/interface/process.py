"""This process in its job: who and where it is, and what every part of the interface needs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from unidist.errors import StateError, UnsupportedOperation

if TYPE_CHECKING:
    from unidist.backend import Backend, Capabilities
    from unidist.collectives import Collectives
    from unidist.control.watch import Watch
    from unidist.data.results import Results
    from unidist.training.spelled_out import SpelledOut
    from unidist.training.trainer import Trainer
    from unidist.world import World


class Process:
    """The attributes are set when a Strategy starts."""

    _name: str  # of the backend
    _backend: Backend
    _watch: Watch
    _results: Results
    _trainer: Trainer
    _spelled_out: SpelledOut
    _closed: bool

    @property
    def world(self) -> World:
        return self._backend.world

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def local_rank(self) -> int:
        return self.world.local_rank

    @property
    def world_size(self) -> int:
        return self.world.world_size

    @property
    def node_rank(self) -> int:
        return self.world.node_rank

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def device(self) -> str:
        return self._backend.device

    @property
    def framework(self) -> str:
        """What models are written in: "torch", "mxnet" or "oneflow"."""
        return self._backend.framework

    @property
    def backend(self) -> str:
        return self._name

    @property
    def capabilities(self) -> Capabilities:
        return self._backend.capabilities

    def _require_open(self) -> None:
        if self._closed:
            raise StateError("this Strategy is closed: do the work inside its `with` block")

    def _require(self, capability: str) -> None:
        answer = getattr(self._backend.capabilities, capability)
        if answer is not True:
            raise UnsupportedOperation(f"{self._name} does not support {capability}: {answer}")

    @property
    def _collectives(self) -> Collectives:
        return self._watch.collectives

    def _say(self, line: str) -> None:
        sys.stderr.write(line + "\n")  # one write: lines of several processes do not mix
        sys.stderr.flush()

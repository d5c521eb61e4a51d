"""Saving a run, and going on where it was."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from unidist.errors import StateError, UsageError
from unidist.interface.process import Process

if TYPE_CHECKING:
    from unidist.checkpoint.job import Parts


class Checkpoints(Process):
    def save(
        self,
        path: str | os.PathLike[str],
        *,
        model: Any = None,
        optimizer: Any = None,
        loader: Any = None,
        keep: int | None = None,
        **values: Any,
    ) -> None:
        """Write a checkpoint: a directory of safetensors and JSON, complete or not there at all. Every rank calls it.

        `values` are your own: numbers, strings, lists, dicts. With `keep=3`, `path` is a folder of the last three,
        numbered by updates.
        """
        self._require_open()
        from unidist.checkpoint import job

        def ask() -> Parts:
            return self._checkpointed(model, optimizer, loader, loads=False)

        with self._watch.paused("save"):
            compare = self._trainer.compare
            job.save(path, self._backend, self._collectives, self._watch.gather, ask, compare, keep=keep, values=values)

    def load(
        self,
        path: str | os.PathLike[str],
        *,
        model: Any = None,
        optimizer: Any = None,
        loader: Any = None,
        generators: bool | None = None,
    ) -> dict[str, Any]:
        """Go on where `save` was, on this or another number of ranks; returns your own values. Every rank calls it,
        and needs to see `path`.

        A folder written with `keep=` is read at its latest. What does not fit, or cannot be read by one of the ranks,
        raises `CheckpointError` on all of them, and changes nothing on any.

        The random generators go on where they were when a run is resumed, with `optimizer=` or `loader=`, and are
        left alone when a model is loaded by itself; `generators` True or False says otherwise.
        """
        self._require_open()
        from unidist.checkpoint import job

        def ask() -> Parts:
            return self._checkpointed(model, optimizer, loader, loads=True)

        with self._watch.paused("load"):
            return job.load(path, self._backend, self._watch.gather, ask, generators=generators)

    def _checkpointed(self, model: Any, optimizer: Any, loader: Any, loads: bool) -> Parts:
        """What to save or load, at a time when that can be done."""
        from unidist.checkpoint.job import Parts

        schedule = None
        if optimizer is not None:
            if model is None:
                raise UsageError("optimizer= needs model= too: its state is named after the model's parameters")
            self._require("optimizer_state")
            schedule = self._trainer.prepared_as(model, optimizer).schedule
        parts = Parts(model, optimizer, schedule, loader, self._trainer.schedules_of(model))
        if (schedule is not None or loads) and self._spelled_out.is_open(model):
            raise StateError("in the middle of a step its gradients would be lost: save or load after step(optimizer)")
        if any(affected.in_group for affected in (parts.schedules if loads else filter(None, [schedule]))):
            raise StateError(
                "in the middle of an accumulation group its gradients would be lost, or change other weights than they "
                "were computed for: save or load after an update, or call flush(model, optimizer) first, which makes "
                "one"
            )
        if schedule is not None and schedule.apart:
            raise StateError(
                "between two averages of local SGD every rank has its own parameters: call average_parameters(model)"
            )
        return parts

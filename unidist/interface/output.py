"""What this process prints and writes. Only `log_to` talks to other ranks, once, for the name of a folder."""

from __future__ import annotations

import builtins
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from unidist.interface.process import Process

if TYPE_CHECKING:
    import logging

    from unidist.output import Metrics, Progress


class Output(Process):
    _bar: Progress | None
    _log_handlers: list[logging.Handler]

    def print(self, *values: object, **how: Any) -> None:
        """`print` on rank 0, nothing on the others."""
        if self.is_main:
            if self._bar is not None:
                self._bar.clear()  # the next step brings it back
            builtins.print(*values, **{"flush": True, **how})

    def log(self, *values: object) -> None:
        """A line from any rank, to standard error, with the rank in front."""
        self._say(f"[rank {self.rank}] " + " ".join(map(str, values)))

    def progress(self, loader: Any, label: str = "") -> Progress:
        """A progress bar on rank 0: speed over all ranks, time left, and what you show beside it.

            bar = strategy.progress(loader, f"epoch {epoch}")
            for x, y in bar.over(loader):
                bar.show(loss=step(x, y))

        Where the output is not a terminal, a plain line now and then.
        """
        from unidist.output import Progress

        steps = len(loader) if hasattr(loader, "__len__") else None
        samples = loader.batch.global_batch if hasattr(loader, "batch") else 0
        self._bar = Progress(steps, samples, label=label, active=self.is_main)
        return self._bar

    def metrics(
        self, folder: str | os.PathLike[str], formats: Sequence[str] = ("csv",), *, resume: int | None = None
    ) -> Metrics:
        """Write numbers by step, on rank 0: `metrics.write(step, loss=…)`. Formats: "csv", "jsonl", "tensorboard".

        After a restart the files are continued; with `resume=120` rows after step 120 are dropped first.
        """
        from unidist.output import Metrics

        return Metrics(folder, formats, resume=resume, active=self.is_main)

    def log_to(self, folder: str | os.PathLike[str], level: int = 20) -> None:
        """Send what this process logs by `logging` to `folder/DATE-TIME/rank-N.log`, one folder for all ranks.

        `level` is the lowest that is written; 20 is logging.INFO.
        """
        self._require_open()
        import logging

        from unidist.output import rank_log, stamp

        handler = rank_log(folder, self.rank, stamp(self._collectives.broadcast(time.time(), 0)))
        root = logging.getLogger()
        root.addHandler(handler)
        self._log_handlers.append(handler)
        root.setLevel(min(root.level, level) if root.level else level)

    def _close_logs(self) -> None:
        for handler in self._log_handlers:
            import logging

            logging.getLogger().removeHandler(handler)
            handler.close()

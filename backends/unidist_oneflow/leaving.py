"""How a process ends. OneFlow's own way out waits for the other ranks, which after a failure may never come; and it
aborts those that are left behind, in whatever they are doing. So a process that ends waits until nobody needs it."""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Callable
from typing import Any

from unidist.plugin import CommunicationError, Peers, end_process, ending, parting
from unidist_oneflow.keeper import Keeper


class Leaving:
    """From `install` on. `own_exit` is what OneFlow does at the end of the process."""

    def __init__(self, peers: Peers | None, keeper: Keeper, oneflow_exit: Callable[..., Any]) -> None:
        self._peers, self._keeper, self._oneflow_exit = peers, keeper, oneflow_exit
        self._left = self._failed = self._raised = False

    def install(self) -> None:
        atexit.register(self._at_exit)  # after oneflow's, so it runs before it
        skipped = (self._at_exit, self._oneflow_exit)
        ending.offer(ending.Shortcut(self._cannot_leave_well, skipped, self._after_failure))

    def leaves(self, failed: bool) -> None:
        """The Strategy is left; after an exception, which may still be caught, the others may not be there any more."""
        self._left, self._failed = True, failed
        if not failed:
            self._keeper.dismiss()
        else:
            ending.note_the_end()

    def _cannot_leave_well(self, uncaught: BaseException | None) -> bool:
        self._raised = uncaught is not None
        return self._failed or self._raised

    def _after_failure(self, code: int) -> None:
        """An error that nobody caught has been told, and ends the others. One that was caught may not concern them."""
        if self._peers is not None and not self._raised:
            with contextlib.suppress(CommunicationError):
                if parting.outlast(self._peers, code) != "failed":
                    self._keeper.dismiss()

    def _at_exit(self) -> None:
        """The script has ended, and nobody has closed the Strategy: OneFlow may go when it is so on all ranks."""
        peers = self._peers
        if self._left or peers is None:
            return
        how = parting.all_at_their_end(peers)
        self._keeper.dismiss()
        if how != "exits":  # OneFlow would wait for those who gave up
            end_process(ending.code())

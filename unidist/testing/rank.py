"""One rank of a conformance launch: `unidist run … -m unidist.testing.rank ZOO FOLDER CHECK…` runs the checks."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import sys
import time
import traceback
from pathlib import Path


def main(zoo: str, folder: str, names: list[str]) -> int:
    from unidist import Strategy
    from unidist.control import connect_from_env, watch
    from unidist.testing import checks  # noqa: F401  # registers them
    from unidist.testing.case import CHECKS, Case, DoesNotApply

    watch.PATIENCE = 20.0  # a rank that failed will not come: do not wait for it as long as one would in real life
    with contextlib.redirect_stderr(io.StringIO()) as heard:
        strategy = Strategy()
    with strategy, (Path(folder) / f"rank-{strategy.rank}.jsonl").open("w") as results:
        case = Case(strategy, importlib.import_module(zoo), heard.getvalue(), Path(folder))
        control = connect_from_env()
        assert control is not None
        for name in names:
            error, skipped, began = None, None, time.perf_counter()
            try:
                CHECKS[name](case)
            except DoesNotApply as reason:
                skipped = str(reason)
            except Exception:
                error = traceback.format_exc()
            record = {"check": name, "error": error, "skipped": skipped, "seconds": time.perf_counter() - began}
            results.write(json.dumps(record) + "\n")
            results.flush()
            # Not through the engine: after a failure the ranks may be in different places of it.
            said = [error is not None, skipped is not None]
            everywhere = control.gather(f"after {name}", strategy.rank, strategy.world_size, said, 60.0)
            if everywhere not in ([[False, False]] * strategy.world_size, [[False, True]] * strategy.world_size):
                os._exit(3)  # they cannot be brought together again: the suite starts new ones for what is left
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))

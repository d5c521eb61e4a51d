"""One rank of a conformance launch: `unidist run … -m unidist.testing.rank ZOO FOLDER CHECK…` runs the checks."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import sys
import traceback
from pathlib import Path


def main(zoo: str, folder: str, names: list[str]) -> int:
    os.environ["UNIDIST_DEBUG"] = "1"
    from unidist import Strategy, watch
    from unidist.control import connect_from_env
    from unidist.testing import checks  # noqa: F401  # registers them
    from unidist.testing.case import CHECKS, Case

    watch.PATIENCE = 20.0  # a rank that failed will not come: do not wait for it as long as one would in real life
    with contextlib.redirect_stderr(io.StringIO()) as heard:
        strategy = Strategy()
    with strategy, (Path(folder) / f"rank-{strategy.rank}.jsonl").open("w") as results:
        case = Case(strategy, importlib.import_module(zoo), heard.getvalue(), Path(folder))
        control = connect_from_env()
        assert control is not None
        for name in names:
            error = None
            try:
                CHECKS[name](case)
            except Exception:
                error = traceback.format_exc()
            results.write(json.dumps({"check": name, "error": error}) + "\n")
            results.flush()
            # Not through the engine: after a failure the ranks may be in different places of it.
            if any(control.gather(f"after {name}", strategy.rank, strategy.world_size, error is not None, 60.0)):
                os._exit(3)  # they cannot be brought together again: the suite starts new ones for what is left
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))

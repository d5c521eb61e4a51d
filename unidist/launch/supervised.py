"""The supervisor as a program, for `unidist.launch`: reads the job from standard input, ends when that closes."""

from __future__ import annotations

import json
import os
import sys

from unidist.errors import UnidistError
from unidist.launch.engine import Settings, run
from unidist.launch.plan import Job


def main() -> int:
    line = b""
    while not line.endswith(b"\n"):  # byte by byte, so that nothing of the lifeline is read ahead
        byte = os.read(0, 1)
        if not byte:
            return 1  # whoever started us is gone already
        line += byte
    spec = json.loads(line)
    job = Job(**{**spec["job"], "command": tuple(spec["job"]["command"]), "ports": ()})
    try:
        return run(job, Settings(**spec["settings"]), lifeline=0).code
    except UnidistError as error:
        print(f"unidist: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

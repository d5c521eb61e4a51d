"""One rank that only meets: `python meeting_rank.py INIT RANK SIZE TIMEOUT [NAME=VALUE …]` prints what it got, as JSON.

A NAME=VALUE is what all ranks must have in common. INIT is tcp://, file:// or env://.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from unidist.control.meeting import Meeting
from unidist.errors import UnidistError
from unidist.world import detect


def main(init: str, rank: str, size: str, timeout: str, *same: str) -> None:
    try:
        if "COMES_LATE" in os.environ:
            sys.stdin.readline()  # until the test says so
        world = detect(init=init, rank=int(rank), world_size=int(size))
        common = dict(each.split("=", 1) for each in same if not each.startswith("times="))
        times = next((int(each[6:]) for each in same if each.startswith("times=")), 1)
        for _ in range(times):
            met = Meeting(world, common, float(timeout)).complete()
            peers = met.peers
            told = peers.gather("hello", {"rank": met.rank}, 30.0)
            peers.control.ask("goodbye")
            peers.control.close()
            if peers.host is not None:
                peers.host.close()
        names = ("rank", "world_size", "local_rank", "local_world_size", "node_rank", "num_nodes", "master_addr")
        found = {name: getattr(met, name) for name in names}
        print(json.dumps(found | {"told": told, "interface": peers.interface, "port": met.master_port}))
    except UnidistError as error:
        print(json.dumps({"error": type(error).__name__, "text": str(error)}))


main(*sys.argv[1:])

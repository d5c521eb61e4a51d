"""A thousand ranks at one control server, on one machine: `python tests/many_ranks.py [ranks] [seconds]` measures it.

The ranks are coroutines that speak the protocol; the server is the process that rank 0 would start.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from unidist.control import protocol
from unidist.control.agreement import ungathered
from unidist.control.host import Host
from unidist.control.protocol import MAGIC, Frames, bind, pack

SECRET, JOB = "between us", "port 1"


class Rank:
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    async def meet(self, port: int) -> tuple[dict[str, Any], bytes]:
        while True:
            try:
                await self.connect(port)
                break
            except (OSError, EOFError):  # pushed out by the crowd: as any client, it comes again
                await asyncio.sleep(0.1)
        mine = json.dumps({"host": f"h{self.rank // 8}", "node": "x" * 80, "seen": "10.0.0.1"}).encode()
        same = {"the script": "train.py (sha256 0123456789ab)", "the version of unidist": "1", "the options": "none"}
        place = {"rank": self.rank, "size": self.size}
        self.writer.write(
            pack({"id": 1, "op": "gather", "key": "m", "member": True, "wait": 120, "same": same, **place}, mine)
        )
        return await self.answer()

    async def connect(self, port: int) -> None:
        self.frames = Frames()
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", port)
        challenge, nonce = (await self.answer())[0]["challenge"], protocol.challenge()
        proof = protocol.proof(SECRET, "client", challenge, nonce)
        self.writer.write(MAGIC + pack({"nonce": nonce, "proof": proof, "job": JOB, "generation": 1, "host": "h"}))
        assert "welcome" in (await self.answer())[0]
        self.frames.trusted = True

    async def answer(self) -> tuple[dict[str, Any], bytes]:
        while True:
            for header, body in self.frames:
                return header, body
            data = await self.reader.read(1 << 16)
            if not data:
                raise EOFError
            self.frames.feed(data)

    async def beat(self, seconds: float, interval: float) -> None:
        said = {
            "op": "beat",
            "role": "worker",
            "rank": self.rank,
            "operation": "step",
            "paused": False,
        }
        await asyncio.sleep(interval * self.rank / self.size)
        for n in range(int(seconds / interval)):
            self.writer.write(pack({**said, "step": n, "moves": n, "together": n}))
            await asyncio.sleep(interval)


async def simulate(size: int, seconds: float, one_dies: bool) -> dict[str, Any]:
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    host = Host([listener], SECRET, JOB, 1, widen=False)
    ranks = [Rank(rank, size) for rank in range(size)]
    before = time.perf_counter()
    told = await asyncio.gather(*(rank.meet(port) for rank in ranks))
    met = time.perf_counter() - before
    assert len({body for _, body in told}) == 1
    values = [json.loads(each) for each in ungathered(*told[0])]
    assert [value["host"] for value in values] == [f"h{rank // 8}" for rank in range(size)]
    used, began = cpu(host.pid), time.perf_counter()
    await asyncio.gather(*(rank.beat(seconds, 1.0 + size / 1024) for rank in ranks))
    found = {
        "ranks": size,
        "seconds to meet": round(met, 2),
        "MB of the server": round(memory(host.pid) / 2**20, 1),
        "share of a core for heartbeats": round((cpu(host.pid) - used) / (time.perf_counter() - began), 4),
    }
    if one_dies:
        before = time.perf_counter()
        ranks[1].writer.transport.abort()
        heard = await asyncio.gather(*(rank.answer() for rank in ranks if rank.rank != 1))
        assert all(header["cause"]["rank"] == 1 for header, _ in heard)
        found["seconds until all know of a death"] = round(time.perf_counter() - before, 2)
    for rank in ranks:
        rank.writer.write(pack({"op": "goodbye"}))
        rank.writer.close()
    await asyncio.sleep(0)
    await asyncio.to_thread(host.close)
    return found


def cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def run(size: int, seconds: float) -> dict[str, Any]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 2 * size + 200)), hard))
    try:
        return asyncio.run(simulate(size, seconds, one_dies=True))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


if __name__ == "__main__":
    socket.setdefaulttimeout(60)
    print(run(int(sys.argv[1]) if len(sys.argv) > 1 else 1024, float(sys.argv[2]) if len(sys.argv) > 2 else 10.0))

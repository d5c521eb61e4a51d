"""The meeting on several hosts: who is where comes from the connections made, whatever the master is called."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hosts import Hosts, outcome

RANK = [sys.executable, str(Path(__file__).resolve().parents[1] / "meeting_rank.py")]


def meet(
    hosts: Hosts, places: list[tuple[int, str]], port: int, timeout: float = 60, **env: str
) -> list[dict[str, Any]]:
    """What each rank got that was started on host number so-and-so, with this as the master's address."""
    size = str(len(places))
    started = [
        hosts[host].start(
            [*RANK, "env://", str(rank), size, str(timeout)],
            env={"MASTER_ADDR": address, "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": size, **env},
        )
        for rank, (host, address) in enumerate(places)
    ]
    return [json.loads(out) | {"said": err} for _, out, err in outcome(*started)]


@pytest.mark.parametrize("secret", ["", "between us"])
def test_a_master_that_knows_itself_as_localhost(hosts: Hosts, secret: str) -> None:
    """As Kubeflow's operator tells the master's pod; the others know it by its address."""
    address = hosts[0].address
    places = [(0, "localhost"), (0, "localhost"), (1, address), (2, address)]
    met = meet(hosts, places, 29610, **({"UNIDIST_SECRET": secret} if secret else {}))
    assert [each["rank"] for each in met] == [0, 1, 2, 3], met
    assert [each["local_rank"] for each in met] == [0, 1, 0, 0]
    assert [each["node_rank"] for each in met] == [0, 0, 1, 2]
    assert {each["master_addr"] for each in met} == {address}
    assert {each["interface"] for each in met} == {"eth0"}
    assert ("anyone who reaches" in met[0]["said"]) == (not secret)


def test_localhost_on_every_host(hosts: Hosts) -> None:
    met = meet(hosts, [(0, "localhost"), (1, "localhost")], 29611, timeout=5)
    assert [each["error"] for each in met] == ["RanksMissing", "CommunicationError"]
    for each in met:
        assert "localhost" in each["text"]


def test_a_firewall_that_drops_everything(hosts: Hosts) -> None:
    hosts.cut(1)
    try:
        met = meet(hosts, [(0, hosts[0].address), (1, hosts[0].address)], 29612, timeout=5)
    finally:
        hosts.heal(1)
    assert [each["error"] for each in met] == ["RanksMissing", "CommunicationError"]
    assert "rank 1 of 2 did not come" in met[0]["text"]
    assert hosts[0].address in met[1]["text"]


def test_the_address_of_the_master_is_another_hosts(hosts: Hosts) -> None:
    met = meet(hosts, [(0, hosts[2].address), (1, hosts[2].address)], 29613, timeout=5)
    assert [each["error"] for each in met] == ["RanksMissing", "CommunicationError"]
    assert "nobody listens there" in met[1]["text"]


CABLE = """
import sys, time
from unidist.control.lifeline import Lifeline
from unidist.control.meeting import Meeting
from unidist.world import detect
peers = Meeting(detect(), {}, 60.0).complete().peers
Lifeline(peers.control, "worker", peers.rank, peers.control.host, peers.launched).start()
print("met", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("pulled", [0, 1])
def test_a_pulled_cable_is_noticed_by_all(hosts: Hosts, pulled: int) -> None:
    """No goodbye, no reset. The ranks beside the server name the one that is gone; that one, the server."""
    place = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29614", "WORLD_SIZE": "3"}
    place["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    ranks = [hosts[n].start([sys.executable, "-c", CABLE], env={**place, "RANK": str(n)}) for n in range(3)]
    for each in ranks:
        assert each.stdout is not None
        assert each.stdout.readline() == "met\n"
    hosts.cut(pulled)
    try:
        ended = outcome(*ranks)
    finally:
        hosts.heal(pulled)
    for rank, (code, _, said) in enumerate(ended):
        if rank == pulled == 0:
            assert re.search("PeerFailed: rank [12] on h[12]: ended", said), said
        elif rank == pulled or pulled == 0:
            assert "the server of the job's meeting is gone" in said, said
        else:
            assert f"PeerFailed: rank {pulled} on h{pulled}: ended" in said, said
        assert code == 1, said

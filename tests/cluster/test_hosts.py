"""The hosts are what they claim to be: separate names, addresses, ssh, links, Slurm, Open MPI, and a clean end."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hosts import MPI, SLURM, Hosts, why_not


def test_each_has_its_own_name_and_address(hosts: Hosts) -> None:
    for host in (hosts[0], hosts[1], hosts[2]):
        assert host.run(["hostname"]).stdout.strip() == host.name
        assert host.address in host.run(["ip", "-o", "addr", "show", "eth0"]).stdout
        assert host.run(["getent", "hosts", "h2"]).stdout.split()[0] == hosts[2].address


def test_ssh_between_them(hosts: Hosts) -> None:
    ended = hosts[0].run([hosts.ssh, "h2", "hostname; exit 7"])
    assert (ended.stdout.strip(), ended.returncode) == ("h2", 7)


def test_a_cable_pulled_and_put_back(hosts: Hosts) -> None:
    reach = [sys.executable, "-c", f"import socket; socket.create_connection(({hosts[1].address!r}, 2222), 1)"]
    assert hosts[0].run(reach).returncode == 0
    hosts.cut(1)
    try:
        assert hosts[0].run(reach).returncode != 0
    finally:
        hosts.heal(1)
    assert hosts[0].run(reach).returncode == 0


def test_a_slow_link(hosts: Hosts) -> None:
    hosts.limit(1, "1mbit")
    try:
        assert "rate 1Mbit" in hosts[1].run(["tc", "qdisc", "show", "dev", "eth0"]).stdout
    finally:
        hosts.limit(1, None)
    assert "tbf" not in hosts[1].run(["tc", "qdisc", "show", "dev", "eth0"]).stdout


def test_slurm(hosts: Hosts) -> None:
    if reason := why_not(*SLURM):
        pytest.skip(reason)
    ended = hosts[0].run(["srun", "-N3", "-n3", "sh", "-c", "echo $SLURM_PROCID $(hostname)"], env=hosts.slurm())
    assert sorted(ended.stdout.splitlines()) == ["0 h0", "1 h1", "2 h2"], ended.stderr


def test_open_mpi(hosts: Hosts) -> None:
    if reason := why_not(*MPI):
        pytest.skip(reason)
    ended = hosts[0].run([*hosts.mpirun(2), "-np", "6", "sh", "-c", "echo $OMPI_COMM_WORLD_RANK $(hostname)"])
    rows = sorted(ended.stdout.splitlines())
    assert [row.split()[0] for row in rows] == list("012345"), ended.stderr
    assert {row.split()[1] for row in rows} == {"h0", "h1", "h2"}


def test_nothing_is_left_of_them(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    base = tmp_path / "with space"
    base.mkdir()
    with Hosts(base, 2) as hosts:
        made = {each for each in os.listdir("/run/netns") if each.startswith(hosts.prefix)}
        process = hosts[1].start(["sleep", "600"])
        assert hosts[0].run([hosts.ssh, "h1", "true"]).returncode == 0
    process.communicate(timeout=10)
    assert process.returncode != 0
    assert len(made) == 3  # a switch, too; tests at the same time have others
    assert not made & set(os.listdir("/run/netns"))

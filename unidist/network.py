"""Small truths about this process and its host: addresses, the interfaces that hold them, what tells it apart."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import time

_SIOCGIFADDR = 0x8915


def is_loopback(address: str) -> bool:
    return address in ("localhost", "::1") or address.startswith("127.")


def resolve(host: str) -> str:
    """An address for this name, IPv4 if there is one. Raises socket.gaierror."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])


def is_own(address: str) -> bool:
    """Whether a socket of this host can have this address."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def address_towards(host: str) -> str:
    """The address from which this host would send to that one. Raises OSError where no way leads there."""
    address = resolve(host)
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing: it only asks the routing table
        return str(probe.getsockname()[0])


def addresses() -> dict[str, str]:
    """The IPv4 address of each interface that has one, by the interface's name."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def interface_of(address: str) -> str | None:
    """The interface that holds an address of this host."""
    interfaces = addresses()
    if is_loopback(address):
        return next((name for name, held in interfaces.items() if is_loopback(held)), None)
    return next((name for name, held in interfaces.items() if held == address), None)


def outward_address() -> str:
    """The address under which other hosts would reach this one, as far as it can know; else loopback."""
    for host in (socket.gethostname(), "192.0.2.1"):
        with contextlib.suppress(OSError):
            address = address_towards(host)
            if not is_loopback(address) and ":" not in address:
                return address
    return next((held for held in addresses().values() if not is_loopback(held)), "127.0.0.1")


def identity() -> str:
    """What processes share that can use loopback and one set of devices together: the machine and its network.

    The name alone would not do: many machines are called localhost, and containers share their machine's boot.
    """
    boot = network = ""
    with contextlib.suppress(OSError):
        boot = boot_id()
    with contextlib.suppress(OSError):
        network = os.readlink("/proc/self/ns/net")
    return f"{socket.gethostname()} {boot} {network}"


def process_age() -> float:
    """Seconds since this process was started, by the kernel's account."""
    started = int(process_status("self")[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def boot_id() -> str:
    """What tells this start of this machine from all others. Raises OSError where there is no /proc."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def process_status(pid: int | str) -> list[str]:
    """The fields of /proc/<pid>/stat behind the name, which may contain anything: state, parent, …"""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()

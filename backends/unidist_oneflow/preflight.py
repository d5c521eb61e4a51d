"""What would make OneFlow wait for ever, though all ranks are there: found out before it starts, and told to all."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence

from unidist.plugin import CommunicationError, Peers, World, WorldError, holder


def check_doors(peers: Peers, timeout: float) -> None:
    """Beside ctrl_port OneFlow talks on ports that the system chooses: try one of each host from all the others.

    When it returns, all ranks have come here.
    """
    with socket.socket() as door:
        door.bind(("", 0))
        door.listen(512)
        doors = peers.gather("doors", door.getsockname()[1], timeout)
        closed = peers.gather("closed doors", closed_door(peers, doors), timeout)
    if any(closed):
        raise CommunicationError(next(filter(None, closed)))


def closed_door(peers: Peers, doors: Sequence[int]) -> str | None:
    """What is wrong when this rank cannot reach a rank of another host, or None; one rank of each host is tried."""
    tried = {peers.address}
    for rank, (address, door) in enumerate(zip(peers.addresses, doors, strict=True)):
        if address in tried:
            continue
        tried.add(address)
        try:
            socket.create_connection((address, door), 3.0).close()
        except OSError as error:
            return (
                f"rank {peers.rank} on {peers.hosts[peers.rank]} cannot reach rank {rank} on {peers.hosts[rank]} at "
                f"{address}, port {door} ({error.strerror or error}). OneFlow talks on ports that it chooses itself, "
                "beside ctrl_port, so it would wait for ever: open them all between the nodes (firewall), and start "
                "containers with the host's network (docker run --net=host; mapping ports by -p is not enough)."
            )
    return None


def agree_on_port(world: World, peers: Peers, timeout: float) -> int:
    """The port of OneFlow's own server on rank 0: where the ranks have met, unless somebody else needs that one."""
    said: tuple[int, str | None] = (0, None)
    if world.rank == 0:
        if peers.host is not None:
            peers.host.release()
        said = try_port(0 if world.port_taken else world.master_port or 0)
    port, problem = peers.gather("OneFlow's port", said, timeout)[0]
    if problem is not None:
        raise WorldError(problem)
    return int(port)


def try_port(port: int) -> tuple[int, str | None]:
    """The port (0: a free one), and why it cannot be used, if so: OneFlow would abort the process."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # for the connections that the meeting has left
        try:
            probe.bind(("", port))
            return int(probe.getsockname()[1]), None
        except OSError as error:
            who = f": {holder(port)}" if error.errno == errno.EADDRINUSE else ""
            return port, (
                f"OneFlow cannot listen on port {port} of rank 0's host, {socket.gethostname()} ({error.strerror})"
                f"{who}. Choose another with ctrl_port=, the same on every node."
            )


def check_interface(peers: Peers | None, on_gpu: bool) -> None:
    """NCCL picks an interface itself, and may pick a virtual one: give it the one that leads to the other nodes."""
    known = sorted(name for _, name in socket.if_nameindex())
    carrier = peers.interface if on_gpu and peers and len(set(peers.addresses)) > 1 else None
    asked = os.environ.get("NCCL_SOCKET_IFNAME", "")
    if not asked:
        if carrier:
            os.environ["NCCL_SOCKET_IFNAME"] = carrier
        return
    named = tuple(name for name in asked.lstrip("^=").split(",") if name)
    left = [name for name in known if name.startswith(named) != asked.startswith("^")]
    if not left or (carrier and carrier not in left):
        wanted = f"{carrier}, which leads to the other nodes" if carrier else f"one of {', '.join(known)}"
        raise WorldError(
            f"NCCL_SOCKET_IFNAME is {asked!r}, which leaves NCCL {', '.join(left) or 'no interface'} on this host "
            f"({socket.gethostname()}): let it name {wanted}, or unset it"
        )

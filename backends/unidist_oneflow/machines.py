"""From the list of machines to this process's place among all: which node is this host?"""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import replace
from pathlib import Path

import unidist
from unidist.plugin import World, WorldError, network
from unidist_oneflow import DEFAULT_CTRL_PORT, OneFlowOptions


def place(found: World, options: OneFlowOptions) -> World:
    """The World that the options describe; what a launcher has said is kept, and has to agree with them. Only the port
    may be another one."""
    if options.ctrl_port is not None and found.world_size > 1:
        found = replace(found, master_port=options.ctrl_port, port_taken=False)
    if len(options.machine or ()) > 1:
        found = replace(found, rivals=options.machine[1:])
    if not options.describes_cluster:
        return found
    nodes, per_node = len(options.machine or ("here",)), options.gpu_device_num
    if found.source == "none":
        if (per_node or 1) > 1:
            start_all_processes(options)
        return replace(world_of(options, 0, 1), rivals=found.rivals)
    expected = nodes * (per_node or found.local_world_size or 1)
    if (options.machine is not None or found.num_nodes == 1) and found.world_size != expected:
        raise WorldError(
            f"{found.source} started {found.world_size} processes ({found.reason}), but machine and gpu_device_num "
            f"describe {nodes} node{'s' * (nodes > 1)} x {expected // nodes} = {expected}: leave these options out, or "
            "start the script on every node with plain `python`"
        )
    return found


def world_of(options: OneFlowOptions, local_rank: int, per_node: int) -> World:
    machine = options.machine or ("127.0.0.1",)
    node = node_rank(options)
    return World(
        rank=node * per_node + local_rank,
        world_size=len(machine) * per_node,
        local_rank=local_rank,
        local_world_size=per_node,
        node_rank=node,
        num_nodes=len(machine),
        master_addr=machine[0],
        master_port=options.ctrl_port or DEFAULT_CTRL_PORT,
        source="machine",
        reason=f"machine lists {', '.join(machine)}; this is node {node}",
    )


def node_rank(options: OneFlowOptions) -> int:
    """This host's place in the list: given, or the only entry that is an address of this host."""
    machine = options.machine or ("127.0.0.1",)
    if options.node_rank is not None:
        return options.node_rank
    if len(machine) == 1:
        return 0
    matches = [node for node, address in enumerate(machine) if is_own(address)]
    if len(matches) == 1:
        return matches[0]
    which = "none of them" if not matches else f"nodes {', '.join(map(str, matches))}"
    raise WorldError(
        f"which node is this host? machine lists {', '.join(machine)}; this host ({socket.gethostname()}) has "
        f"{', '.join(own_addresses()) or 'no address'}: {which} match{'es' * (not matches)}. Correct the list, the "
        "same on every node, or settle it with node_rank=N. A container that has addresses of its own needs the "
        "host's network instead (docker run --net=host)."
    )


def is_own(address: str) -> bool:
    try:
        return network.is_own(network.resolve(address))
    except OSError as error:
        raise WorldError(f"machine lists {address!r}, which this host cannot resolve ({error.strerror})") from None


def own_addresses() -> list[str]:
    """Loopback last: for a person to compare."""
    return sorted(network.addresses().values(), key=network.is_loopback)


def start_all_processes(options: OneFlowOptions) -> None:
    """Become `unidist run`, which starts this script once for each process of the node. Does not return."""
    arguments = ["-m", "unidist", "run", "--backend", "oneflow", "--nproc", str(options.gpu_device_num)]
    for name in ("machine", "ctrl_port", "node_rank"):
        value = getattr(options, name)
        if value is not None:
            arguments += [f"--option={name}={','.join(value) if name == 'machine' else value}"]
    main = sys.modules["__main__"]
    script = getattr(main, "__file__", None)
    if main.__spec__ is not None:
        target = ["-m", main.__spec__.name.removesuffix(".__main__")]
    elif script and Path(script).is_file():
        target = [script]
    else:
        raise WorldError(
            f"gpu_device_num is {options.gpu_device_num}, and there is no script to start so often: put the code into "
            f"a file and run `python {' '.join(arguments)} train.py` on every node"
        )
    command = [sys.executable, *arguments, *target, *sys.argv[1:]]
    sys.stderr.write(f"unidist: gpu_device_num is {options.gpu_device_num}: going on as `{' '.join(command)}`\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(Path(str(unidist.__file__)).resolve().parents[1]), os.environ.get("PYTHONPATH")])
    )
    os.execv(sys.executable, command)

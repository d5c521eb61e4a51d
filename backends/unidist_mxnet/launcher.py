"""MXNet's own launchers (launch.py, Kubeflow's MXJob): what they tell their processes by DMLC_* and MX_CONFIG."""

from __future__ import annotations

import json
from collections.abc import Mapping

from unidist.plugin import (
    Launcher,
    Place,
    Variables,
    World,
    WorldError,
    check_rank,
    master_at,
    network,
    whole_number,
)

MARKER = "DMLC_ROLE"
ROLES = ("worker", "server", "scheduler")


def detect(env: Variables) -> World | None:
    role = env.text("DMLC_ROLE")
    if role is None:
        return None
    if role not in ROLES:
        raise WorldError(f"DMLC_ROLE is {role!r}; expected one of {', '.join(ROLES)}")
    env = env.of("MXNet's launcher sets it with DMLC_ROLE; unset DMLC_ROLE to start without")
    size, _ = env.numbers("DMLC_NUM_WORKER", "DMLC_NUM_SERVER")  # ps-lite wants both, and says so badly
    addr, port = env.text("DMLC_PS_ROOT_URI"), env.port("DMLC_PS_ROOT_PORT")
    if addr is None:
        raise WorldError("DMLC_PS_ROOT_URI is not set, but DMLC_ROLE is: set it to the scheduler's address")
    together = env.text("DMLC_JOB_CLUSTER") == "local"  # launch.py --launcher local
    index = _mx_config(env, role, addr, port) if "MX_CONFIG" in env else None
    rank = -1  # ps-lite numbers the workers only when they connect
    if role == "worker":
        for name in ("DMLC_WORKER_ID", *(["DMLC_TASK_ID"] if together else [])):
            if rank < 0 and name in env:
                rank, size = env.rank(name, "DMLC_NUM_WORKER")
        if index is not None and rank not in (-1, index):
            raise WorldError(f"DMLC_WORKER_ID is {rank}, but task.index in MX_CONFIG is {index}: unset one of them")
        rank = rank if index is None else index
    place: Place = {"local_rank": -1, "local_world_size": 0, "node_rank": -1, "num_nodes": 0}
    if rank >= 0:
        place = env.place(rank, size, None if together else addr)
    elif together or network.is_loopback(addr):
        place = {"local_rank": -1, "local_world_size": size, "node_rank": 0, "num_nodes": 1}
    reason = f"DMLC_ROLE is {role}" + ("" if index is None else " and MX_CONFIG is set")
    return World(
        rank,
        size,
        **place,
        **master_at(addr, port),
        role=role,
        port_variable="DMLC_PS_ROOT_PORT",
        port_taken=True,
        source="dmlc",
        reason=reason,
    )


def _mx_config(env: Variables, role: str, addr: str, port: int) -> int:
    """The index of this pod among those of its role in a Kubeflow MXJob, whose other variables must agree."""
    advice = "the Kubeflow operator sets both; unset MX_CONFIG if this is no pod of an MXJob"
    try:
        config = json.loads(env.text("MX_CONFIG") or "")
        replicas = {
            name: [(replica["url"], replica["port"]) for replica in of] for name, of in config["cluster"].items()
        }
        kind, index = config["task"]["type"], config["task"]["index"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WorldError(f"MX_CONFIG cannot be read ({type(error).__name__}: {error}): {advice}") from error
    for name, said, found in (
        ("DMLC_ROLE", role, str(kind).lower()),
        ("DMLC_NUM_WORKER", env.number("DMLC_NUM_WORKER"), len(replicas.get("worker", ()))),
        ("DMLC_NUM_SERVER", env.number("DMLC_NUM_SERVER"), len(replicas.get("server", ()))),
        ("DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT", [(addr, port)], replicas.get("scheduler", [])),
    ):
        if said != found:
            raise WorldError(f"{name}: {said!r} is set, but MX_CONFIG says {found!r}: {advice}")
    check_rank("task.index in MX_CONFIG", index, f"the number of {role}s in it", len(replicas[role]), advice)
    return int(index)


def count(env: Mapping[str, str]) -> int:
    workers, servers = (whole_number(env.get(f"DMLC_NUM_{role}")) for role in ("WORKER", "SERVER"))
    return workers + servers + 1 if workers else 0  # and the scheduler


LAUNCHER = Launcher(
    name="a launcher of MXNet",
    marker=MARKER,
    count=count,
    shown=(MARKER, "DMLC_NUM_WORKER", "DMLC_NUM_SERVER", "DMLC_PS_ROOT_URI"),
    instead="`python {script}` in each role",
    detect=detect,
    private="DMLC_(ROLE|PS_ROOT_URI|PS_ROOT_PORT|NUM_SERVER|NUM_WORKER|NODE_HOST|WORKER_ID|SERVER_ID)",
)

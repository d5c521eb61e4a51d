"""horovodrun: what it tells its processes, and how they find each other by that."""

from __future__ import annotations

from unidist.plugin import Launcher, Variables, World, number_in

MARKER = "HOROVOD_RANK"
PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"


def detect(env: Variables) -> World | None:
    if MARKER not in env:
        return None
    env = env.of("horovodrun sets it; start with horovodrun, or unset HOROVOD_RANK")
    rank, size = env.rank("HOROVOD_RANK", "HOROVOD_SIZE")
    local_rank, local_size = env.rank("HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE")
    node, nodes = env.rank("HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE")
    # horovodrun does not say where rank 0 is, but keeps values for all; set by hand, this is rank 0's address.
    master, note = env.meeting_point("HOROVOD_GLOO_RENDEZVOUS_ADDR", PORT), None
    if addr := master["master_addr"]:
        note = f"http://{f'[{addr}]' if ':' in addr else addr}:{master['master_port']}/unidist/meeting"
    else:
        master = env.meeting_point()
    return World(
        rank,
        size,
        local_rank,
        local_size,
        node,
        nodes,
        **master,
        source="horovod",
        reason="HOROVOD_RANK is set",
        placed=True,
        port_variable=PORT if note else "MASTER_PORT",
        note=note,
    )


LAUNCHER = Launcher(
    name="horovodrun",
    marker=MARKER,
    count=number_in("HOROVOD_SIZE"),
    shown=("HOROVOD_SIZE", MARKER),
    instead="`horovodrun … python {script}`",
    detect=detect,
    private="HOROVOD_((LOCAL_|CROSS_)?(RANK|SIZE)|HOSTNAME|CONTROLLER|GLOO_RENDEZVOUS_.*)",
)

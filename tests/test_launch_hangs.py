"""`unidist run`: restarts, hangs and ports."""

from __future__ import annotations

import os
import re
import signal
import socket
import time

import pytest

from launch_support import RUN, Place
from project import free_port

# -- restarts, hangs, ports ----------------------------------------------------------------------------------------


def test_restarts(place: Place) -> None:
    script = place.script(
        """
        print("attempt", os.environ["UNIDIST_RESTART"], os.environ["MASTER_PORT"])
        sys.exit(4 if os.environ["UNIDIST_RESTART"] < "2" and rank == 1 else 0)
        """
    )
    ended = place.run(*RUN, "-n", "2", "--max-restarts", "3", script)
    assert ended.code == 0
    assert set(re.findall(r"attempt (\d)", ended.out)) == {"0", "1", "2"}
    assert "started again 2 times" in ended.err
    assert ended.err.count("worker 1 on") >= 2
    assert len(set(re.findall(r"attempt \d (\d+)", ended.out))) == 3  # fresh ports
    enough = place.run(*RUN, "-n", "2", "--max-restarts", "1", script)
    assert enough.code == 4
    assert "restart 1 of 1" in enough.err


def test_a_fixed_port_lasts_for_all_attempts(place: Place) -> None:
    script = place.script(
        """
        import socket
        port = int(os.environ["MASTER_PORT"])
        with socket.create_server(("127.0.0.1", port)) as server, socket.create_connection(("127.0.0.1", port)):
            server.accept()[0].close()  # the side that closes first has the port for another minute
        sys.exit(4 if os.environ["UNIDIST_RESTART"] == "0" else 0)
        """
    )
    port = str(free_port())
    ended = place.run(*RUN, "--master-port", port, "--max-restarts", "1", script)
    assert ended.code == 0, ended.err
    assert place.run(*RUN, "--master-port", port, "--max-restarts", "1", script).code == 0  # nor is there a wait


def test_a_stop_is_not_a_failure_to_restart_from(place: Place) -> None:
    process = place.start(*RUN, "--max-restarts", "5", place.script("time.sleep(600)"))
    place.wait_for_pids(1)
    process.send_signal(signal.SIGTERM)
    assert place.end(process).code == 143
    assert len(place.pids()) == 1


HEART = """
    from unidist.control import Heart, connect_from_env
    heart = Heart(connect_from_env(), rank, interval=0.1)
"""

LIFELINE = """
    from unidist.control import Heart
    from unidist.control.lifeline import Lifeline
    from unidist.control.meeting import Meeting
    from unidist.world import detect
    peers = Meeting(detect(), {}, 60.0).complete().peers
    heart = Heart(peers.control, rank, interval=0.1).start()
    heart.stepped()  # the engine is up
    lifeline = Lifeline(peers.control, "worker", rank, "here", peers.launched, lambda: heart.place).start()
"""


def test_a_hang_is_reported_and_ended(place: Place) -> None:
    script = place.script(
        HEART
        + """
    if rank < 3:
        heart.start()
        for step in range(20):
            heart.at("step", step, training=True)
        if rank != 1:
            heart.at("all_reduce", 19)
    time.sleep(600)
    """
    )
    ended = place.run(*RUN, "-n", "4", "--timeout", "5", script)
    assert ended.code == 124
    assert "no progress for 5 s" in ended.summary[0]
    text = "\n".join(ended.summary)
    for rank in (0, 2):
        assert re.search(rf"worker {rank}: step 19, in all_reduce, for \d+ s$", text, re.M)
    assert re.search(r"worker 1: step 19, in step, for \d+ s  <- behind the others$", text, re.M)
    assert re.search(r"worker 3: not heard of  <- missing$", text, re.M)
    assert "in <module>" in ended.err  # where each was in the script


def test_who_has_ended_or_left_is_not_hung(place: Place) -> None:
    script = place.script(
        HEART
        + """
    heart.start()
    if rank == 0: os._exit(0)  # without a word
    if rank == 1: heart.stop()
    for step in range(70):
        time.sleep(0.1)
        heart.at("step", step, training=True)
    """
    )
    ended = place.run(*RUN, "-n", "3", "--timeout", "3", script)
    assert ended.code == 0, ended.err


def test_who_gives_up_and_ends_well_ends_the_job(place: Place) -> None:
    script = place.script(
        LIFELINE
        + """
    if rank == 1:
        lifeline.gives_up(ValueError("kept to itself"))  # as a Strategy does that is left by an exception
        print("never mind", file=sys.stderr)
        sys.exit(0)
    heart.at("all_reduce", 0)
    time.sleep(600)
    """
    )
    ended = place.run(*RUN, "-n", "2", script)
    assert ended.code == 1
    assert ended.summary[0].startswith("unidist: worker 1 on ")
    assert "ValueError: kept to itself" in ended.summary[0]


@pytest.mark.parametrize("operation", ["step", "all_reduce"])
def test_who_breaks_off_what_others_wait_in_ends_the_job(place: Place, operation: str) -> None:
    """They have begun it before, and begin nothing else."""
    script = place.script(
        LIFELINE
        + f"""
    import contextlib
    heart.at({operation!r}, 0, training={operation == "step"})
    try:
        with heart.waiting() if {operation!r} != "step" else contextlib.nullcontext():
            if rank == 1: raise ValueError("kept to itself")
            time.sleep(600)
    except ValueError as error:
        lifeline.gives_up(error)
    """
    )
    ended = place.run(*RUN, "-n", "2", script)
    assert ended.code == 1
    assert "ValueError: kept to itself" in ended.summary[0]


@pytest.mark.parametrize("way", ["raise", "sys.exit(0)"])
def test_all_may_give_up_each_in_its_time(place: Place, way: str) -> None:
    script = place.script(
        LIFELINE
        + f"""
    for step in range(20):
        heart.at("step", step, training=True)
        heart.stepped()
    time.sleep(8 * rank)
    error = SystemExit(0) if {way!r} != "raise" else ValueError("of all")
    lifeline.gives_up(error)
    if isinstance(error, SystemExit): raise error
    time.sleep(8 * (2 - rank))  # goes on without a Strategy
    print("done", rank)
    """
    )
    ended = place.run(*RUN, "-n", "3", script)
    assert ended.code == 0, ended.err
    assert ended.out.count("done") == (3 if way == "raise" else 0)


@pytest.mark.parametrize("way", ["os._exit(0)", "sys.exit(0)"])
def test_who_ends_well_in_mid_training_ends_the_job(place: Place, way: str) -> None:
    script = place.script(
        LIFELINE
        + f"""
    for step in range(20):
        heart.at("step", step, training=True)
    if rank == 1: {way}
    for step in range(600):
        time.sleep(0.1)
        heart.at("step", step, training=True)
    """
    )
    ended = place.run(*RUN, "-n", "2", script)
    assert ended.code == 1
    assert ended.summary[0].startswith("unidist: worker 1 on ")
    assert "ended in mid-training without closing its Strategy" in ended.summary[0]


def test_who_never_closes_is_forgiven_when_all_have_done_the_same(place: Place) -> None:
    script = place.script(
        LIFELINE
        + """
    for step in range(20):
        heart.at("step", step, training=True)
    if rank == 0: time.sleep(4)  # has something to write, alone
    """
    )
    ended = place.run(*RUN, "-n", "2", script)
    assert ended.code == 0, ended.err


def test_waiting_for_our_reader_is_no_hang(place: Place) -> None:
    script = place.script(
        HEART
        + """
    heart.start()
    for step in range(40):
        print("x" * 100_000)
        heart.at("step", step, training=True)
    """
    )
    process = place.start(*RUN, "--timeout", "2", script)
    time.sleep(5)
    ended = place.end(process)
    assert ended.code == 0, ended.err
    assert len(ended.out) == 40 * (100_000 + len("[worker 0] \n"))


def test_a_slow_start_is_no_hang(place: Place) -> None:
    # What comes after the start leaves a busy machine time to end the process, too.
    script = place.script(HEART + "    time.sleep(3 + rank); heart.start(); time.sleep(0.3)")
    ended = place.run(*RUN, "-n", "2", "--timeout", "2", script)
    assert ended.code == 0, ended.err


def test_paused_ranks_and_who_waits_for_them_are_not_hung(place: Place) -> None:
    script = place.script(
        HEART
        + """
    with heart:
        if rank == 0:
            with heart.pause(): time.sleep(4)
        else:
            time.sleep(5)  # it takes a while until who has waited gets on
    """
    )
    assert place.run(*RUN, "-n", "2", "--timeout", "2", script).code == 0


def test_a_rank_that_waits_for_others_in_a_long_operation_excuses_nobody(place: Place) -> None:
    """As `if strategy.is_main: strategy.save(…)` does: rank 0 waits inside save, the others train on and then wait."""
    script = place.script(
        HEART
        + """
    with heart:
        if rank == 0:
            with heart.pause():
                heart.at("save: all_gather {kind: int64 (), length: int64 ()}", 3)
                with heart.waiting(): time.sleep(600)
        for step in range(5):
            heart.at("step", step, training=True)
        time.sleep(600)
    """
    )
    ended = place.run(*RUN, "-n", "2", "--timeout", "3", script)
    assert ended.code == 124
    text = "\n".join(ended.summary)
    assert re.search(r"worker 0: step 3, waits in save, for \d+ s", text)
    assert "every rank must call the same methods" in text
    assert re.search(r"worker 1: step 4, in step, for \d+ s", text)


def test_a_taken_port_names_its_holder(place: Place) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = place.run(*RUN, "--master-port", str(port), place.script(""))
    assert ended.code == 1
    assert f"port {port}" in ended.err
    assert f"process {os.getpid()} has it" in ended.err
    assert place.pids() == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--master-port", "70000"), "1 to 65535"),
        (("--master-port", "-5"), "1 to 65535"),
        (("--master-addr", "192.0.2.7"), "an address of this machine"),
        (("--bucket-cap-mbb", "5"), "Did you mean --bucket-cap-mb?"),
    ],
)
def test_wrong_addresses_and_options_are_explained(place: Place, arguments: tuple[str, ...], says: str) -> None:
    ended = place.run(*RUN, *arguments, place.script(""))
    assert ended.code in (1, 2)
    assert says in ended.err
    assert "Traceback" not in ended.err
    assert place.pids() == []


def test_jobs_at_the_same_time_do_not_share_ports(place: Place) -> None:
    script = place.script(
        """
        import socket
        if rank == 0:
            server = socket.socket()
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
            server.listen()
        wait_for(8)
        """
    )
    jobs = [place.start(*RUN, "-n", "2", script) for _ in range(4)]
    assert [place.end(job).code for job in jobs] == [0] * 4

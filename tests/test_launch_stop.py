"""`unidist run` that is stopped or killed, from outside or by a failure: everything ends, in its time."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from launch_support import PATIENCE, RUN, STAY, Place


def test_nohup_is_respected(place: Place) -> None:
    command = ["nohup", *place.command(*RUN, place.script("leave(10**9); time.sleep(2)"))]
    process = subprocess.Popen(
        command, env=place.env, cwd=place.path, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    place.wait_for_pids(2)
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 0


def test_who_ignores_sigterm_is_killed(place: Place) -> None:
    script = place.script(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child("import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)", start_new_session=True)
        wait_for(4)
        time.sleep(0.2)
        if rank == 1: sys.exit(3)
        time.sleep(600)
        """
    )
    assert place.run(*RUN, "-n", "2", "--grace", "0.5", script).code == 3


def test_time_to_tidy_up_is_given(place: Place) -> None:
    script = place.script(
        """
        def tidy(*_):
            print("tidied", flush=True)
            sys.exit(0)
        if rank == 0: signal.signal(signal.SIGTERM, tidy)
        leave(10**9 + rank)
        wait_for(4)
        if rank == 1: sys.exit(3)
        time.sleep(600)
        """
    )
    ended = place.run(*RUN, "-n", "2", script)
    assert ended.code == 3
    assert "[worker 0] tidied" in ended.out


@pytest.mark.parametrize(("number", "says"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_stopping_from_outside(place: Place, number: signal.Signals, says: str) -> None:
    process = place.start(*RUN, "-n", "2", place.script(STAY + "time.sleep(600)"))
    place.wait_for_pids(6)
    process.send_signal(number)
    ended = place.end(process)
    assert ended.code == 128 + number
    assert ended.summary == [f"unidist: stopped by {says}"]
    assert "Traceback" not in ended.err


def test_a_second_ctrl_c_does_not_wait(place: Place) -> None:
    script = place.script("signal.signal(signal.SIGTERM, signal.SIG_IGN); leave(10**9); time.sleep(600)")
    process = place.start(*RUN, "--grace", "500", script)
    place.wait_for_pids(2)
    process.send_signal(signal.SIGINT)
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(0.2)
        except subprocess.TimeoutExpired:
            continue
    assert place.end(process).code == 130


@pytest.mark.parametrize("moment", [0.0, 0.005, 0.02, 0.1])
def test_ctrl_c_at_the_start(place: Place, moment: float) -> None:
    process = place.start(*RUN, "-n", "2", place.script("time.sleep(600)"))
    assert process.stderr
    assert process.stderr.readline().startswith("unidist: plain on 2 workers")  # now it forks
    time.sleep(moment)
    process.send_signal(signal.SIGINT)
    ended = place.end(process)
    assert ended.code == 130
    assert "Traceback" not in ended.err


def test_a_stop_in_the_middle_of_a_failure_is_not_restarted_from(place: Place) -> None:
    script = place.script(
        """
        if rank == 1:
            signal.signal(signal.SIGTERM, lambda *_: leave(10**9))
            leave(10**9 + 1)
            while True: time.sleep(0.1)
        wait_for(3)
        sys.exit(7)
        """
    )
    process = place.start(*RUN, "-n", "2", "--grace", "2", "--max-restarts", "5", script)
    place.wait_for_pids(4)  # worker 1 was asked to end, and does not
    process.send_signal(signal.SIGINT)
    ended = place.end(process)
    assert ended.code == 7
    assert "restart" not in ended.err


def test_what_the_workers_leave_behind_gets_time_to_end(place: Place) -> None:
    script = place.script(
        """
        code = "import signal, sys, time\\nsignal.signal(signal.SIGTERM, lambda *_: (print('tidied'), sys.exit()))"
        child(code + "\\nprint('up', flush=True)\\ntime.sleep(600)")
        time.sleep(1)
        """
    )
    ended = place.run(*RUN, script)
    assert ended.code == 0
    assert "[worker 0] tidied" in ended.out
    assert "ended what the workers had left running" in ended.err


@pytest.mark.parametrize("victim", ["launcher", "supervisor", "the launcher's process group"])
def test_killing_the_launcher_leaves_nothing_behind(place: Place, victim: str) -> None:
    process = place.start(*RUN, "-n", "2", place.script(STAY + "time.sleep(600)"))
    place.wait_for_pids(6)
    if victim == "launcher":
        process.kill()
    elif victim == "supervisor":
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        title = Path(f"/proc/{children[0]}/cmdline").read_bytes()  # whoever kills by name does not kill both
        assert title.startswith(b"supervisor of process %d" % process.pid)
        os.kill(int(children[0]), signal.SIGKILL)
    else:
        os.killpg(process.pid, signal.SIGKILL)
    ended = place.end(process)
    assert ended.code in (-9, 137)
    place.all_gone()

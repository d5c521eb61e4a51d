"""`unidist run` of which a process fails: everything ends together, and the first cause is named."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from launch_support import PATIENCE, ROLES, ROOT, RUN, STAY, Place


def test_one_fails_all_end_and_its_code_is_ours(place: Place) -> None:
    script = place.script(
        STAY
        + """
        wait_for(9)
        if rank == 1:
            print("what went wrong", file=sys.stderr)
            sys.exit(7)
        time.sleep(600)
        """.replace("\n        ", "\n")
    )
    ended = place.run(*RUN, "-n", "3", script)
    assert ended.code == 7
    assert ended.summary[0].startswith("unidist: worker 1 on ")
    assert ended.summary[0].endswith("failed first: exit code 7")
    assert ended.summary[1].strip() == "what went wrong"
    assert "2 other processes" in ended.summary[-1]


def test_a_signal_is_named_and_counted_as_a_shell_does(place: Place) -> None:
    script = place.script("wait_for(2)\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(600)")
    ended = place.run(*RUN, "-n", "2", script)
    assert ended.code == 128 + 9
    assert "worker 1" in ended.summary[0]
    assert "SIGKILL" in ended.summary[0]


def test_the_first_cause_is_not_an_echo(place: Place) -> None:
    script = place.script(
        """
        wait_for(3)
        if rank == 0:  # dies first, but only because worker 2 is on its way out
            raise RuntimeError("[transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711")
        if rank == 2:
            time.sleep(0.3)
            sys.exit(5)
        time.sleep(600)
        """
    )
    ended = place.run(*RUN, "-n", "3", script)
    assert ended.code == 5
    assert "worker 2" in ended.summary[0]
    assert any("then failed: worker 0" in line for line in ended.summary)


def test_an_error_that_was_handled_long_ago_is_no_cause(place: Place) -> None:
    script = place.script(
        """
        import traceback
        if rank == 0:
            try: {}["x"]
            except KeyError: traceback.print_exc()
            print("went on", file=sys.stderr)
        leave(10**9 + rank)
        wait_for(4)
        if rank == 1: os._exit(3)
        time.sleep(1)
        sys.exit("gave up")
        """
    )
    ended = place.run(*RUN, "-n", "2", script)
    assert ended.code == 3
    assert ended.summary[0].startswith("unidist: worker 1 on ")


def test_the_scripts_own_connections_are_no_echo(place: Place) -> None:
    script = place.script(
        """
        import socket
        if rank == 0:
            socket.create_connection(("127.0.0.1", 1))
        time.sleep(1)
        raise RuntimeError("rank 0 did not come")
        """
    )
    assert "worker 0 on" in place.run(*RUN, "-n", "2", script).summary[0]


def test_a_cause_that_is_slow_to_die(place: Place) -> None:
    script = place.script(
        """
        import atexit
        wait_for(2)
        if rank == 1:
            atexit.register(lambda: (leave(10**9), time.sleep(2)))
            raise ValueError("the cause")
        wait_for(3)
        time.sleep(0.5)
        raise RuntimeError("the other one has stopped talking to me")
        """
    )
    ended = place.run(*RUN, "-n", "2", script)
    assert "worker 1" in ended.summary[0]
    assert "ValueError: the cause" in "\n".join(ended.summary)


def test_what_is_not_shown_is_not_referred_to(place: Place) -> None:
    script = place.script(
        """
        import traceback
        if rank == 0: wait_for(3)
        try: {}["x"]
        except KeyError: traceback.print_exc()
        if rank == 1: leave(10**9)
        """
    )
    assert "[worker 0] KeyError: 'x'" in place.run(*RUN, "-n", "2", "--quiet", script).err


def test_the_same_error_everywhere_is_shown_once(place: Place) -> None:
    ended = place.run(*RUN, "-n", "4", place.script("wait_for(4)\nraise ValueError('boom')"))
    assert ended.code == 1
    assert len(re.findall(r"^\[worker \d\] Traceback", ended.err, re.M)) == 1


def test_a_survivor_that_prints_without_end(place: Place) -> None:
    script = place.script("wait_for(2)\nif rank == 1: sys.exit(3)\nwhile True: print('x' * 500)")
    ended = place.run(*RUN, "-n", "2", script)
    assert ended.code == 3
    assert "worker 1" in ended.summary[0]


# -- roles ---------------------------------------------------------------------------------------------------------


def test_services_end_with_the_workers(place: Place) -> None:
    script = place.script(
        """
        print(os.environ["ROLE"], os.environ["ROOT_PORT"], os.environ["PORT"], "RANK" in os.environ)
        wait_for(5)
        if role == "server" and rank == 1: time.sleep(600)   # does not notice by itself
        if role != "worker":
            while True: time.sleep(600)
        """
    )
    ended = place.run(*ROLES, script)
    assert ended.code == 0, ended.err
    names = sorted(re.findall(r"^\[(.*?)\]", ended.out, re.M))
    assert names == ["scheduler", "server 0", "server 1", "worker 0", "worker 1"]
    assert len(set(re.findall(r"\d{4,}", ended.out))) == 5  # a port for each, the scheduler's being the root
    assert "worker" in re.findall(r"(\w+) \d+ \d+ True", ended.out)
    assert "server" in re.findall(r"(\w+) \d+ \d+ False", ended.out)


@pytest.mark.parametrize(("role", "name"), [("scheduler", "scheduler"), ("server", "server 0")])
def test_a_service_that_fails_ends_the_job(place: Place, role: str, name: str) -> None:
    script = place.script(f"wait_for(5)\nif (role, rank) == ('{role}', 0): os.abort()\ntime.sleep(600)")
    ended = place.run(*ROLES, script)
    assert ended.code == 128 + signal.SIGABRT
    assert ended.summary[0].startswith(f"unidist: {name} on ")
    assert "SIGABRT" in ended.summary[0]


# -- what is shown of it -------------------------------------------------------------------------------------------


FAREWELL = 'raise RuntimeError("[transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711")'


def test_the_farewell_of_an_innocent_rank_comes_after_the_cause_and_in_one_line(place: Place) -> None:
    script = place.script(
        f"""
        wait_for(2)
        if rank == 0:
            {FAREWELL}
        time.sleep(0.3)
        raise ValueError("the true cause")
        """
    )
    ended = place.run(*RUN, "-n", "2", "--log-dir", "logs", script)
    shown = [line for line in ended.err.splitlines() if line.startswith("[worker ")]
    assert [line for line in shown if line.startswith("[worker 0]")] == shown[-1:]
    assert "(failed because another had: RuntimeError: [transport/tcp/pair.cc:534] Connection closed" in shown[-1]
    assert "[worker 1] ValueError: the true cause" in shown
    assert "Traceback" in (place.path / "logs" / "worker-0.log").read_text()


def test_a_lost_peer_that_is_the_cause_or_was_handled_is_shown_in_full(place: Place) -> None:
    handled = place.script(f"import traceback\ntry: {FAREWELL}\nexcept RuntimeError: traceback.print_exc()\n")
    ended = place.run(*RUN, "-n", "1", handled)
    assert (ended.code, ended.err.count("[worker 0] Traceback")) == (0, 1)
    ended = place.run(*RUN, "-n", "1", place.script(FAREWELL))
    assert (ended.code, ended.err.count("[worker 0] Traceback")) == (1, 1)


def test_an_error_on_torch_has_one_prefix_and_the_survivor_one_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            import numpy, torch, unidist
            x = numpy.zeros((400, 8), "float32")
            with unidist.Strategy() as strategy:
                model, optimizer = strategy.prepare(torch.nn.Linear(8, 1), unidist.SGD(lr=0.1))
                step = strategy.train_step(model, optimizer, lambda m, x: m(x).mean())
                for number, x in enumerate(strategy.loader(x, global_batch=4)):
                    if (number, strategy.rank) == (7, 1):
                        raise ValueError("a bad batch")
                    step(x)
            """
        )
    )
    command = [sys.executable, "-m", "unidist", "run", "--backend", "torch", "--nproc", "2", str(script)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE, stdin=subprocess.DEVNULL)
    assert "[worker 1] ValueError: a bad batch" in ended.stderr, ended.stderr
    assert "[rank" not in ended.stderr
    assert ended.stderr.count("Traceback") == 2, ended.stderr  # as it was printed, and in the summary
    assert re.search(r"^unidist: worker 1 on \S+ failed first: exit code 1$", ended.stderr, re.MULTILINE)

"""`unidist run` on real processes: what they get, what is shown, and how everything ends together."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from test_launch_support import PATIENCE, Place

RUN = ("run", "--backend", "plain")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.all_gone()  # after every test, whatever it was about


# -- what a process gets -------------------------------------------------------------------------------------------


def test_each_process_knows_its_place(place: Place) -> None:
    script = place.script("import json; print(json.dumps({'argv': sys.argv[1:], **os.environ}))")
    foreign = {
        "TORCHELASTIC_RUN_ID": "x",
        "RANK": "7",
        "HOROVOD_RANK": "3",
        "DMLC_ROLE": "server",
        "NCCL_DEBUG": "INFO",
    }
    ended = place.run(*RUN, "--nproc", "3", "--option", "depth=2", script, "--", "--epochs", "3", "-q", **foreign)
    assert ended.code == 0, ended.err
    shown = {m[1]: json.loads(m[2]) for m in re.finditer(r"^\[(worker \d)\] (.*)$", ended.out, re.M)}
    assert sorted(shown) == ["worker 0", "worker 1", "worker 2"]
    for rank, env in enumerate(shown[name] for name in sorted(shown)):
        assert env["argv"] == ["--", "--epochs", "3", "-q"]
        expected = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "3", "ROLE": "worker", "BACKEND": "plain"}
        assert {name: env[f"UNIDIST_{name}"] for name in expected} == expected
        assert (env["RANK"], env["WORLD_SIZE"]) == (str(rank), "3")
        assert json.loads(env["UNIDIST_OPTIONS"]) == {"depth": 2}
        assert env["MASTER_PORT"] == shown["worker 0"]["MASTER_PORT"]
        assert env["UNIDIST_CONTROL"].startswith("http://127.0.0.1:")
        assert int(env["OMP_NUM_THREADS"]) >= 1
        assert env["NCCL_DEBUG"] == "INFO"
        assert not {"TORCHELASTIC_RUN_ID", "HOROVOD_RANK", "DMLC_ROLE"} & set(env)
    assert "OMP_NUM_THREADS=" in ended.err


def test_a_users_omp_num_threads_stays(place: Place) -> None:
    ended = place.run(*RUN, place.script("print(os.environ['OMP_NUM_THREADS'])"), OMP_NUM_THREADS="5")
    assert ended.out == "[worker 0] 5\n"
    assert "OMP" not in ended.err


def test_a_module_and_this_unidist(place: Place) -> None:
    place.script("import unidist; print('from', unidist.__version__)", "thing.py")
    ended = place.run(*RUN, "-n", "2", "-m", "thing", "x")
    assert ended.code == 0, ended.err
    assert ended.out.count("from ") == 2


def test_torchruns_spellings(place: Place) -> None:
    script = place.script("print(os.environ['MASTER_PORT'])")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ended = place.run(
        *RUN,
        "--standalone",
        "--nnodes=1",
        "--nproc_per_node=2",
        "--master_port",
        port,
        "--rdzv-id=1",
        "--tee=3",
        script,
    )
    assert ended.code == 0, ended.err
    assert ended.out.count(port) == 2
    assert "--rdzv-id, --tee not needed" in ended.err
    refused = place.run(*RUN, "--nnodes=2", script)
    assert refused.code == 2
    assert "one machine" in refused.err


def test_the_network_options(place: Place) -> None:
    script = place.script("print([os.environ.get(n) for n in ('NCCL_DEBUG', 'NCCL_IB_DISABLE', 'GLOO_SOCKET_IFNAME')])")
    ended = place.run(*RUN, "--nccl-debug", "INFO", "--nccl-ib-disable", "--interface", "lo", script)
    assert "['INFO', '1', 'lo']" in ended.out
    refused = place.run(*RUN, "--interface", "eth77", script)
    assert refused.code == 2
    assert "this machine has" in refused.err


# -- what is refused before anything starts ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--option", "dpeth=2"), "Did you mean 'depth'?"),
        (("--option", "depth=0"), "depth is 0"),
        (("--option", "depth"), "name=value"),
        (("--nproc", "0"), "--nproc 0"),
        (("--nproc", "two"), "--nproc two"),
        (("--servers", "1"), "no servers"),
        (("--max-restarts", "-1"), "'-1' is not"),
        (("--timeout", "0"), "'0' is not"),
    ],
)
def test_wrong_arguments_start_nothing(place: Place, arguments: tuple[str, ...], says: str) -> None:
    ended = place.run(*RUN, *arguments, place.script(""))
    assert ended.code in (1, 2)
    assert says in ended.err
    assert "Traceback" not in ended.err
    assert place.pids() == []


def test_unknown_backend_and_missing_framework(place: Place) -> None:
    script = place.script("")
    assert "Did you mean 'plain'?" in place.run("run", "--backend", "plian", script).err
    ended = place.run("run", "--backend", "absent", script)
    assert (ended.code, "no_such_framework" in ended.err) == (1, True)
    assert place.pids() == []


def test_a_missing_script_is_said_once(place: Place) -> None:
    ended = place.run(*RUN, "-n", "3", "nowhere.py")
    assert ended.code == 2
    assert ended.err.count("nowhere.py") == 1


def test_a_script_that_fails_at_import_is_shown_once(place: Place) -> None:
    ended = place.run(*RUN, "-n", "3", place.script("\nthis is no python\n"))
    assert ended.code == 1
    assert len(re.findall(r'^\[worker \d\]   File "', ended.err, re.M)) == 1
    summary = "\n".join(ended.summary)
    assert "exit code 1" in summary
    assert "SyntaxError" in summary
    gone = place.run(*RUN, "-n", "3", "-m", "no_such_module")
    assert gone.code == 1
    assert len(re.findall(r"^\[worker \d\] .*python.*: No module named", gone.err, re.M)) == 1


# -- output --------------------------------------------------------------------------------------------------------


def test_lines_are_never_mixed(place: Place) -> None:
    script = place.script("for i in range(3000): print(rank, i, 'x' * (i % 200), file=(sys.stdout, sys.stderr)[i % 2])")
    ended = place.run(*RUN, "-n", "3", script)
    assert ended.code == 0
    for text in (ended.out, ended.err):
        lines = [line for line in text.splitlines() if not line.startswith("unidist: ")]
        assert len(lines) == 3 * 1500
        for line in lines:
            assert re.fullmatch(r"\[worker (\d)\] \1 \d+ x*", line)


def test_a_bar_ends_with_its_last_state(place: Place) -> None:
    script = place.script(
        """
        for i in range(101):
            print(f"{i}%", end="\\r", flush=True)
        if rank == 0: print()
        """
    )
    ended = place.run(*RUN, "-n", "2", script)
    for name in ("worker 0", "worker 1"):
        assert f"[{name}] 100%\n" in ended.out
        assert f"[{name}] \n" not in ended.out


def test_lines_as_windows_ends_them(place: Place) -> None:
    ended = place.run(*RUN, place.script(r"sys.stdout.buffer.write(b'a\r\n\r\nb\r\n')"))
    assert ended.out == "[worker 0] a\n[worker 0] \n[worker 0] b\n"


def test_a_dump_of_the_stack_is_shown_at_once_and_whole(place: Place) -> None:
    script = place.script(
        """
        import traceback
        traceback.print_stack()
        if rank == 0:
            time.sleep(600)
        print("after it", file=sys.stderr)
        """
    )
    process = place.start(*RUN, "-n", "2", script)
    assert process.stderr
    shown = ""
    while "in <module>" not in shown or "[worker 1] after it" not in shown:
        line = process.stderr.readline()
        assert line, shown
        shown += line
    process.send_signal(signal.SIGTERM)
    assert place.end(process).code == 143


def test_output_that_cannot_be_written(place: Place) -> None:
    script = place.script("print('x' * 1000); time.sleep(0.5)")
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            place.command(*RUN, script), env=place.env, stdout=full, stderr=subprocess.PIPE, text=True, timeout=PATIENCE
        )
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == "unidist: our output: No space left on device"
    closed = subprocess.run(
        [*shlex.split("sh -c 'exec \"$@\" >&-' sh"), *place.command(*RUN, script)],
        env=place.env,
        stderr=subprocess.PIPE,
        text=True,
        timeout=PATIENCE,
    )
    assert (closed.returncode, "Traceback" in closed.stderr) == (0, False), closed.stderr
    file = place.path / "a file"
    file.touch()
    assert "--log-dir" in place.run(*RUN, "--log-dir", str(file), script).err.splitlines()[-1]
    (place.path / "logs").mkdir()
    (place.path / "logs" / "worker-0.log").symlink_to("/dev/full")
    ended = place.run(*RUN, "--log-dir", "logs", script)
    assert ended.code == 0
    assert "its log file cannot be written any more" in ended.out


def test_progress_bars_are_thinned_out(place: Place) -> None:
    script = place.script(
        """
        for i in range(501):
            sys.stderr.write(f"\\r{i // 5}% of it")
            time.sleep(0.001)
        sys.stderr.write("\\nafter\\n")
        """
    )
    lines = [line for line in place.run(*RUN, script).err.splitlines() if line.startswith("[worker 0]")]
    assert lines[-2:] == ["[worker 0] 100% of it", "[worker 0] after"]
    assert len(lines) < 20
    assert not any("\r" in line for line in lines)


def test_quiet_labels_and_log_files(place: Place) -> None:
    script = place.script("print('out', rank); print('err', rank, file=sys.stderr)")
    ended = place.run(*RUN, "-n", "2", "--quiet", "--label-master", "--log-dir", "logs/deep", script)
    assert ended.out == "[master] out 0\n"
    assert ended.err == "[master] err 0\n"
    assert sorted(os.listdir(place.path / "logs/deep")) == ["worker-0.log", "worker-1.log"]
    assert sorted((place.path / "logs/deep/worker-1.log").read_text().splitlines()) == ["err 1", "out 1"]


def test_colours_on_a_terminal_only(place: Place) -> None:
    script = place.script("print('hello')")
    for env, coloured in (({}, True), ({"NO_COLOR": "1"}, False)):
        ours, theirs = os.openpty()
        process = subprocess.Popen(
            place.command(*RUN, script), env={**place.env, **env}, stdout=theirs, stderr=theirs, cwd=place.path
        )
        os.close(theirs)
        shown = b""
        try:
            while data := os.read(ours, 4096):
                shown += data
        except OSError:  # how a terminal says that nobody is at the other end
            pass
        os.close(ours)
        assert process.wait(PATIENCE) == 0
        assert (b"\x1b[" in shown) is coloured
        assert b"hello" in shown
    assert "\x1b" not in place.run(*RUN, script).out


def test_whoever_reads_us_may_leave(place: Place) -> None:
    script = place.script("child()\nwhile True: print('x' * 1000)")
    process = place.start(*RUN, "-n", "2", script)
    assert process.stdout
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(PATIENCE) == 141
    assert process.stderr
    process.stderr.close()


def test_a_job_ends_while_nobody_reads_it(place: Place) -> None:
    script = place.script(
        """
        if rank == 0:
            while True: print("x" * 1000)
        wait_for(2)
        time.sleep(1)  # the pipe is full by now
        sys.exit(3)
        """
    )
    process = place.start(*RUN, "-n", "2", script)
    place.wait_for_pids(2)
    place.all_gone()  # though not a byte was read
    ended = place.end(process)
    assert ended.code == 3
    assert ended.summary[0].startswith("unidist: worker 1")
    assert set(ended.out.splitlines()) == {"[worker 0] " + "x" * 1000}


def test_a_summary_that_nobody_reads(place: Place) -> None:
    script = place.script("print('x' * 500_000, file=sys.stderr)\nsys.exit(3)")
    command = place.command(*RUN, script)
    with subprocess.Popen(command, env=place.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        place.wait_for_pids(1)
        place.all_gone()
        while process.poll() is None:  # the launcher alone is left, waiting to be read
            process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
        assert process.returncode in (3, 143)  # whichever it heard of first


def test_ctrl_c_while_nobody_reads_us(place: Place) -> None:
    process = place.start(*RUN, place.script("while True: print('x' * 1000)"))
    place.wait_for_pids(1)
    process.send_signal(signal.SIGINT)
    place.all_gone()
    process.send_signal(signal.SIGINT)  # "no, I do not want to see the rest either"
    assert process.wait(PATIENCE) == 130
    assert place.end(process).code == 130


# -- failure -------------------------------------------------------------------------------------------------------

STAY = "child(); child(start_new_session=True); "  # a grandchild in the process group, and one that left it


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


# -- roles ---------------------------------------------------------------------------------------------------------

ROLES = ("run", "--backend", "roles", "-n", "2", "--servers", "2")


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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
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


def test_a_hang_is_reported_and_ended(place: Place) -> None:
    script = place.script(
        HEART
        + """
    if rank < 3:
        heart.start()
        for step in range(20):
            heart.at("step", step)
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
        heart.at("step", step)
    """
    )
    ended = place.run(*RUN, "-n", "3", "--timeout", "3", script)
    assert ended.code == 0, ended.err


def test_who_gives_up_and_ends_well_ends_the_job(place: Place) -> None:
    script = place.script(
        HEART
        + """
    heart.start()
    if rank == 1:
        heart.stop("left after an error")  # as a Strategy does that is left by an exception
        print("never mind", file=sys.stderr)
        sys.exit(0)
    time.sleep(600)
    """
    )
    ended = place.run(*RUN, "-n", "2", script)
    assert ended.code == 1
    assert ended.summary[0].startswith("unidist: worker 1 on ")
    assert "because of an error" in "\n".join(ended.summary)


def test_waiting_for_our_reader_is_no_hang(place: Place) -> None:
    script = place.script(
        HEART
        + """
    heart.start()
    for step in range(40):
        print("x" * 100_000)
        heart.at("step", step)
    """
    )
    process = place.start(*RUN, "--timeout", "2", script)
    time.sleep(5)
    ended = place.end(process)
    assert ended.code == 0, ended.err
    assert len(ended.out) == 40 * (100_000 + len("[worker 0] \n"))


def test_a_slow_start_is_no_hang(place: Place) -> None:
    script = place.script(HEART + "    time.sleep(3 + rank); heart.start(); time.sleep(1.5)")
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


# -- the plan, shown -----------------------------------------------------------------------------------------------


def test_dry_run(place: Place) -> None:
    ended = place.run(*ROLES, "--dry-run=json", place.script(""), "x")
    processes = json.loads(ended.out)
    assert [(p["role"], p["rank"]) for p in processes] == [
        ("scheduler", 0),
        ("server", 0),
        ("server", 1),
        ("worker", 0),
        ("worker", 1),
    ]
    assert all(p["command"][-1] == "x" and p["host"] == "127.0.0.1" for p in processes)
    assert processes[0]["env"]["ROOT_PORT"] == processes[-1]["env"]["MASTER_PORT"]
    assert "UNIDIST_TOKEN" not in ended.out
    table = place.run(*ROLES, "--dry-run", place.script(""))
    assert re.search(r"^server 1 +127.0.0.1 +\S*python\S* .*script.py$", table.out, re.M)
    assert place.pids() == []


def test_the_launcher_imports_no_framework_and_no_numpy(place: Place) -> None:
    code = (
        "import sys; from unidist.cli import main; main(['run', '-b', 'plain', '--dry-run', sys.argv[1]]);"
        "bad = {'numpy', 'torch', 'mxnet', 'oneflow', 'horovod'} & set(sys.modules); sys.exit(str(bad) if bad else 0)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, place.script("")], env=place.env, capture_output=True, text=True, timeout=PATIENCE
    )
    assert ended.returncode == 0, ended.stderr

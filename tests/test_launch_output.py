"""`unidist run`: what the processes print, on one screen."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time

from launch_support import PATIENCE, RUN, Place

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


def on_a_terminal(place: Place, script: str, seen: bytes = b"", **env: str) -> bytes:
    """What `unidist run` shows there. When `seen` is among it, the script finds a file called "seen"."""
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        place.command(*RUN, "-n", "2", script), env={**place.env, **env}, stdout=theirs, stderr=theirs, cwd=place.path
    )
    os.close(theirs)
    shown = b""
    try:
        while data := os.read(ours, 4096):
            shown += data
            if seen in shown:
                (place.path / "seen").touch()
    except OSError:  # how a terminal says that nobody is at the other end
        pass
    os.close(ours)
    assert process.wait(PATIENCE) == 0, shown
    return shown


def screen_of(shown: bytes) -> list[str]:
    """The lines that are left on the terminal."""
    lines = re.sub(rb"\r\n", b"\n", shown).decode().split("\n")
    return [re.sub(r"\x1b\[\d*m", "", line.rpartition("\r\x1b[K")[2]) for line in lines]


def test_colours_on_a_terminal_only(place: Place) -> None:
    script = place.script("print('hello')")
    for env, coloured in (({}, True), ({"NO_COLOR": "1"}, False)):
        shown = on_a_terminal(place, script, **env)
        assert (b"\x1b[" in shown) is coloured
        assert b"hello" in shown
    assert "\x1b" not in place.run(*RUN, script).out


def test_a_terminal_shows_how_far_the_job_is(place: Place) -> None:
    script = place.script("""
        from unidist.control import Heart, connect_from_env
        with Heart(connect_from_env(), rank, interval=0.05) as heart:
            step = 0
            while not os.path.exists("seen"):
                step += 1
                heart.at("step", step, training=True)
                if step % 100 == 1: print("a line", flush=True)
                time.sleep(0.01)
    """)
    shown = on_a_terminal(place, script, seen=b" steps/s  0:0")
    assert re.search(rb"\r\x1b\[K2 workers  step \d+  [\d.]+ steps/s  0:0\d", shown)
    left = [line for line in screen_of(shown) if line and not line.startswith("unidist: plain on 2 workers")]
    assert set(left) == {"[worker 0] a line", "[worker 1] a line"}


def test_a_terminal_shows_the_progress_bar_of_the_first_who_has_one(place: Place) -> None:
    script = place.script("""
        from unidist.output import Progress
        with Progress(10, label="epoch 1", active=rank == 0) as bar:
            while not os.path.exists("seen"):
                bar.show(loss=0.5)
                bar.advance(steps=int(bar.steps < 9))
                time.sleep(0.01)
    """)
    shown = on_a_terminal(place, script, seen=b" 90%  9/10  loss 0.5")
    assert b"[worker 0] epoch 1  [=====================   ]   90%" in shown
    left = [line for line in screen_of(shown) if line and not line.startswith("unidist: plain on 2 workers")]
    assert len(left) == 1, left
    assert left[0].startswith("[worker 0] epoch 1  [")


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

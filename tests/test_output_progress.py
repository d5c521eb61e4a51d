"""The progress bar: plain lines, a line that rewrites itself, and what they cost."""

import fcntl
import io
import os
import pty
import struct
import termios

import pytest

from output_support import Clock, Scalar
from unidist.errors import UsageError
from unidist.output import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_plain_lines_are_few_and_say_what_there_is_to_say():
    clock, out = Clock(), io.StringIO()
    with Progress(100, 64, label="epoch 2", stream=out, clock=clock) as bar:
        for n in range(100):
            clock.now += 1
            bar.advance(loss=1 / (n + 1))
    lines = out.getvalue().splitlines()
    assert lines[0] == "epoch 2    1%  1/100  loss 1  64 samples/s  1:39 left"
    assert lines[-1] == "epoch 2  100%  100/100  loss 0.01  64 samples/s  in 1:40"
    seen = [int(line.split("/")[0].split()[-1]) for line in lines]
    assert seen == [1, 2, 4, 8, 16, 26, 36, 46, 56, 66, 76, 86, 96, 100]
    assert "\r" not in out.getvalue()


def test_a_terminal_line_rewrites_itself():
    clock, out = Clock(), Terminal()
    bar = Progress(4, 1000, stream=out, clock=clock)
    for _ in range(4):
        clock.now += 0.5
        bar.advance()
    bar.close()
    bar.close()
    states = out.getvalue().split("\r")[1:]
    assert len(states) == 5
    assert states[1] == "[============            ]   50%  2/4  2k samples/s  0:01 left\x1b[K"
    assert states[-1].endswith("2k samples/s  in 0:02\x1b[K\n")
    assert out.getvalue().count("\n") == 1


def test_another_line_may_come_between():
    clock, out = Clock(), Terminal()
    bar = Progress(2, stream=out, clock=clock)
    bar.clear()
    assert out.getvalue() == ""
    clock.now += 1
    bar.advance()
    bar.clear()
    out.write("accuracy 0.9\n")
    bar.advance()  # at once, though no time has passed
    assert out.getvalue().endswith(
        "\r\x1b[Kaccuracy 0.9\n\r[========================]  100%  2/2  2 steps/s  0:00 left\x1b[K"
    )


def test_a_loss_is_read_only_when_it_is_drawn():
    clock, out = Clock(), io.StringIO()
    losses = [Scalar(n) for n in range(50)]
    calls = []
    with Progress(50, stream=out, clock=clock) as bar:
        for loss in losses:
            clock.now += 0.1
            bar.advance(loss)
            bar.show(accuracy=lambda: calls.append(1) or 0.5)
    assert sum(loss.reads for loss in losses) == len(out.getvalue().splitlines()) == len(calls) <= 6
    assert "loss 49  accuracy 0.5" in out.getvalue().splitlines()[-1]


def test_what_is_not_one_number_is_refused_at_once():
    for active in (True, False):
        with pytest.raises(UsageError, match=r"loss has shape \(2, 3\)"):
            Progress(stream=io.StringIO(), active=active).advance(Scalar(0, (2, 3)))
    for wrong in (-1, 1.5, True):
        with pytest.raises(UsageError, match="total_steps"):
            Progress(wrong)


def test_over_counts_and_closes():
    clock, out = Clock(), io.StringIO()

    def items():
        for n in range(5):
            clock.now += 1
            yield n

    bar = Progress(5, 10, stream=out, clock=clock)
    assert list(bar.over(items())) == [0, 1, 2, 3, 4]
    assert (bar.steps, bar.samples) == (5, 50)
    assert out.getvalue().splitlines()[-1].endswith("in 0:05")
    bar = Progress(5, 10, stream=out, clock=clock)
    for n in bar.over(items()):
        if n == 3:
            break
    assert out.getvalue().splitlines()[-1] == " 60%  3/5  7.5 samples/s  in 0:04"


def test_without_a_total_and_with_nothing_done():
    clock, out = Clock(), io.StringIO()
    Progress(stream=out, clock=clock).close()
    assert out.getvalue() == ""
    with Progress(stream=out, clock=clock) as bar:
        clock.now += 7200
        bar.advance(steps=10, samples=36_000_000_000)
    assert out.getvalue().splitlines()[-1] == "10 steps  5M samples/s  in 2:00:00"


def test_inactive_ranks_are_silent():
    out = io.StringIO()
    with Progress(5, 1, stream=out, active=False) as bar:
        assert list(bar.over(range(5))) == [0, 1, 2, 3, 4]
        bar.show(loss=1)
    assert out.getvalue() == ""


def test_the_speed_is_that_of_late():
    clock, out = Clock(), io.StringIO()
    bar = Progress(1000, 1, stream=out, clock=clock)
    for seconds in [100.0] * 5 + [10.0] * 40:
        clock.now += seconds
        bar.advance()
    assert out.getvalue().splitlines()[-1].endswith("0.1 samples/s  2:39:10 left")


def test_a_closed_stream_does_not_end_the_training():
    clock, out = Clock(), io.StringIO()
    bar = Progress(5, stream=out, clock=clock)
    out.close()
    clock.now += 5
    bar.advance()
    bar.advance()
    bar.close()


def test_a_real_terminal(monkeypatch):
    """The line is cut to the width, so that it never wraps; a dumb terminal gets plain lines."""
    main, side = pty.openpty()
    try:
        fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
        for kind, mark in (("xterm", b"\r"), ("dumb", b"left")):
            monkeypatch.setenv("TERM", kind)
            clock = Clock()
            with os.fdopen(os.dup(side), "w") as stream:
                bar = Progress(10, 1, label="a label that is long enough", stream=stream, clock=clock)
                clock.now += 3
                bar.advance(loss=0.123456)
                data = os.read(main, 4096)
                assert mark in data
                if kind == "xterm":
                    assert data == b"\ra label that is long enough  [==       \x1b[K"  # 39 columns
                bar.close()
                os.read(main, 4096)
    finally:
        os.close(main)
        os.close(side)

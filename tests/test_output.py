"""The progress bar, the metrics files and the log of each rank, without a framework."""

import csv
import fcntl
import io
import json
import logging
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import textwrap

import numpy as np
import pytest

from unidist.errors import UsageError
from unidist.output import Metrics, Progress, rank_log, stamp
from unidist.setup import store


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Scalar:
    """A device tensor of one number: reading it is what costs."""

    def __init__(self, value, shape=()):
        self.value, self.shape, self.reads = value, shape, 0

    def item(self):
        self.reads += 1
        return self.value


# -- progress ------------------------------------------------------------------------------------------------


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


# -- logs ----------------------------------------------------------------------------------------------------


def test_every_rank_logs_into_one_folder(tmp_path):
    """Eight processes make the folder at the same moment."""
    script = textwrap.dedent(
        """
        import logging, sys
        from unidist.output import rank_log
        folder, rank = sys.argv[1], int(sys.argv[2])
        sys.stdin.readline()
        logging.getLogger().addHandler(rank_log(folder, rank, "run-1"))
        logging.getLogger("mine").warning("here is %d", rank)
        """
    )
    folder = tmp_path / "deep" / "logs"
    ranks = [
        subprocess.Popen([sys.executable, "-c", script, str(folder), str(rank)], stdin=subprocess.PIPE)
        for rank in range(8)
    ]
    for process in ranks:
        process.stdin.write(b"\n")
        process.stdin.close()
    assert [process.wait(60) for process in ranks] == [0] * 8
    for rank in range(8):
        text = (folder / "run-1" / f"rank-{rank}.log").read_text()
        assert text.endswith(f" rank {rank} WARNING mine: here is {rank}\n")
        assert text[10] == "T"
        assert text.split()[0].endswith("Z")


def test_logs_are_appended_and_flushed(tmp_path):
    for _ in range(2):
        handler = rank_log(tmp_path, 0)
        handler.emit(logging.makeLogRecord({"msg": "é"}))
        assert (tmp_path / "rank-0.log").read_text(encoding="utf-8").endswith("é\n")
        handler.close()
    assert len((tmp_path / "rank-0.log").read_text(encoding="utf-8").splitlines()) == 2
    assert stamp(1763268000.9) == "20251116-044000"


def test_wrong_logs_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for how in ((tmp_path, -1), (tmp_path, 0, "../up"), (tmp_path, 0, ""), (tmp_path / "file", 0)):
        with pytest.raises(UsageError, match=r"rank|run"):
            rank_log(*how)


# -- metrics -------------------------------------------------------------------------------------------------

ALL = ("csv", "jsonl", "tensorboard")


def clocked(folder, formats=("csv", "jsonl"), **how):
    return Metrics(folder, formats, clock=Clock(), **how)


def table(folder):
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def events(folder):
    """As TensorBoard itself reads them: tag -> [(step, value)]."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder))
    read.Reload()
    return {tag: [(e.step, pytest.approx(e.value)) for e in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def test_all_formats(tmp_path):
    with clocked(tmp_path / "deep" / "out", ALL) as metrics:
        metrics.write(1, loss=0.5, accuracy=np.float32(0.25))
        metrics.write(2, {"train/loss": Scalar(0.125)}, loss=3)
    folder = tmp_path / "deep" / "out"
    assert (folder / "metrics.csv").read_text() == (
        "step,time,loss,accuracy,train/loss\n1,100.0,0.5,0.25,\n2,100.0,3,,0.125\n"
    )
    assert lines(folder) == [
        {"step": 1, "time": 100.0, "loss": 0.5, "accuracy": 0.25},
        {"step": 2, "time": 100.0, "train/loss": 0.125, "loss": 3},
    ]
    assert events(folder) == {"loss": [(1, 0.5), (2, 3)], "accuracy": [(1, 0.25)], "train/loss": [(2, 0.125)]}


def test_a_new_name_adds_a_column_and_older_rows_have_it_empty(tmp_path):
    with clocked(tmp_path) as metrics:
        metrics.write(0, loss=1)
        metrics.write(0, accuracy=0.5)
        metrics.write(1, loss=0.5)
    assert [(row["step"], row["loss"], row["accuracy"]) for row in table(tmp_path)] == [
        ("0", "1", ""),
        ("0", "", "0.5"),
        ("1", "0.5", ""),
    ]
    assert sorted(os.listdir(tmp_path)) == ["metrics.csv", "metrics.jsonl"]


def test_a_resumed_run_has_no_step_twice(tmp_path):
    with clocked(tmp_path, ALL) as metrics:
        for step in (10, 20, 30, 40):
            metrics.write(step, loss=step)
    with clocked(tmp_path, ALL) as metrics:  # from a checkpoint at step 20
        metrics.write(30, loss=-30)
        metrics.write(30, accuracy=1)
        metrics.write(40, loss=-40)
    assert [(row["step"], row["loss"]) for row in table(tmp_path)] == [
        ("10", "10"),
        ("20", "20"),
        ("30", "-30"),
        ("30", ""),
        ("40", "-40"),
    ]
    assert [row.get("loss") for row in lines(tmp_path)] == [10, 20, -30, None, -40]
    assert events(tmp_path)["loss"] == [(10, 10), (20, 20), (30, -30), (40, -40)]


def test_resume_at_a_stated_step(tmp_path):
    with clocked(tmp_path) as metrics:
        for step in (10, 20, 30):
            metrics.write(step, loss=step)
    with clocked(tmp_path, resume=10) as metrics:
        with pytest.raises(UsageError, match="step 5 after those of step 10"):
            metrics.write(5, loss=0)
        metrics.write(40, loss=40)
    assert [row["step"] for row in table(tmp_path)] == ["10", "40"]
    assert [row["step"] for row in lines(tmp_path)] == [10, 40]


def test_a_new_run_in_an_old_folder_keeps_the_old_files(tmp_path):
    for run in range(3):
        with clocked(tmp_path) as metrics:
            metrics.write(0, {f"run{run}": run})
            metrics.write(1, {f"run{run}": run})
    names = ["metrics.1.csv", "metrics.1.jsonl", "metrics.2.csv", "metrics.2.jsonl", "metrics.csv", "metrics.jsonl"]
    assert sorted(os.listdir(tmp_path)) == names
    assert (tmp_path / "metrics.1.csv").read_text() == "step,time,run0\n0,100.0,0\n1,100.0,0\n"
    assert (tmp_path / "metrics.csv").read_text() == "step,time,run2\n0,100.0,2\n1,100.0,2\n"


def test_a_kill_loses_nothing_that_was_written_and_half_a_line_goes(tmp_path):
    script = textwrap.dedent(
        """
        import os, signal, sys
        from unidist.output import Metrics
        metrics = Metrics(sys.argv[1], sys.argv[2].split(","))
        for step in range(5):
            metrics.write(step, loss=step)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    try:
        import tensorboard  # noqa: F401

        formats = ALL
    except ImportError:
        formats = ALL[:2]
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path), ",".join(formats)], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert [int(row["step"]) for row in table(tmp_path)] == [0, 1, 2, 3, 4]
    assert [row["step"] for row in lines(tmp_path)] == [0, 1, 2, 3, 4]
    if "tensorboard" in formats:
        assert events(tmp_path)["loss"] == [(n, n) for n in range(5)]
    for name, half in (("metrics.csv", "5,1763"), ("metrics.jsonl", '{"step": 5, "ti')):
        with open(tmp_path / name, "a") as file:
            file.write(half)
    with clocked(tmp_path, resume=4) as metrics:
        metrics.write(5, loss=5)
    assert [int(row["step"]) for row in table(tmp_path)] == [0, 1, 2, 3, 4, 5]
    assert [row["step"] for row in lines(tmp_path)] == [0, 1, 2, 3, 4, 5]


def test_a_file_that_is_only_half_a_line(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,ti")
    (tmp_path / "metrics.jsonl").write_text("{" + "x" * 10_000)
    with clocked(tmp_path) as metrics:
        metrics.write(0, loss=1)
    assert len(table(tmp_path)) == len(lines(tmp_path)) == 1


def test_numbers_that_are_not_finite(tmp_path):
    with clocked(tmp_path) as metrics:
        metrics.write(0, a=float("nan"), b=float("inf"), c=-np.inf, d=True)
    assert lines(tmp_path) == [{"step": 0, "time": 100.0, "a": "NaN", "b": "Infinity", "c": "-Infinity", "d": 1}]
    assert (tmp_path / "metrics.csv").read_text().splitlines()[1] == "0,100.0,nan,inf,-inf,1"


def test_names_with_commas_and_quotes(tmp_path):
    with clocked(tmp_path) as metrics:
        metrics.write(0, {'a,"b"': 1})
    assert table(tmp_path)[0]['a,"b"'] == "1"


def test_wrong_metrics_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"no format 'cvs'.* Did you mean 'csv'"):
        Metrics(tmp_path, ["cvs"])
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write metrics to"):
        Metrics(tmp_path / "file" / "x")
    with pytest.raises(UsageError, match="resume"):
        Metrics(tmp_path, resume=-1)
    metrics = clocked(tmp_path)
    metrics.write(3, loss=1)
    for how, words in [
        ({"loss": "high"}, "loss is of type str"),
        ({"loss": np.zeros(2)}, r"loss has shape \(2,\)"),
        ({"loss": None}, "loss is of type NoneType"),
        ({"step": 1}, "called 'step'"),
        ({"time": 1}, "called 'time'"),
        ({"a\nb": 1}, "called"),
    ]:
        with pytest.raises(UsageError, match=words):
            metrics.write(4, how)
    with pytest.raises(UsageError, match="go back"):
        metrics.write(2, loss=1)
    with pytest.raises(UsageError, match="step is"):
        metrics.write(1.5, loss=1)
    assert len(table(tmp_path)) == 1
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "metrics.csv").write_text("epoch,loss\n1,2\n")
    (tmp_path / "other" / "metrics.jsonl").write_text("[1]\n")
    with pytest.raises(UsageError, match="not a table of unidist's"):
        Metrics(tmp_path / "other", "csv")
    with pytest.raises(UsageError, match="other lines than metrics"):
        Metrics(tmp_path / "other", "jsonl", resume=1)


def test_inactive_ranks_touch_nothing(tmp_path):
    loss = Scalar(1.0)
    with Metrics(tmp_path / "out", ALL, active=False) as metrics:
        metrics.write(0, loss=loss)
    assert not (tmp_path / "out").exists()
    assert loss.reads == 0


def test_tensorboard_that_is_not_installed(tmp_path, monkeypatch):
    """The command that adds it is named: pip's, or setup's in an environment that it made."""
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(UsageError, match="-m pip install tensorboard`"):
        Metrics(tmp_path, ["tensorboard"])
    (tmp_path / store.MARKER).write_text('{"python": "x", "stages": {"mxnet": {}, "horovod": {}}}')
    monkeypatch.setenv("UNIDIST_BACKEND", "horovod")
    with pytest.raises(UsageError, match="`unidist setup horovod --with tensorboard`"):
        Metrics(tmp_path, ["tensorboard"])


def test_no_framework_is_imported_for_it(tmp_path):
    script = (
        "import sys; from unidist.output import Metrics\n"
        f"Metrics({str(tmp_path)!r}, ['csv', 'jsonl']).write(0, loss=1)\n"
        "assert not {'numpy', 'torch', 'tensorflow', 'tensorboard'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)

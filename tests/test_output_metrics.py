"""The metrics files, without a framework: written, resumed and refused."""

import csv
import json
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from output_support import Clock, Scalar
from unidist.errors import UsageError
from unidist.output import Metrics
from unidist.setup import store

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

"""The log file of each rank, without a framework."""

import logging
import subprocess
import sys
import textwrap

import pytest

from unidist.errors import UsageError
from unidist.output import rank_log, stamp


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

"""What a run tells: a progress bar, metrics in files, a log for each rank. Nothing here talks to other ranks."""

from unidist.output.logs import rank_log, stamp
from unidist.output.metrics import Metrics
from unidist.output.progress import Progress

__all__ = ["Metrics", "Progress", "rank_log", "stamp"]

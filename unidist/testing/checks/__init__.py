"""All checks, in the order in which they run."""

from unidist.testing.checks import collectives, data, evaluation, job, training

__all__ = ["collectives", "data", "evaluation", "job", "training"]

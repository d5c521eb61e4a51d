"""All checks, in the order in which they run."""

from unidist.testing.checks import checkpoints, collectives, data, evaluation, features, job, training

__all__ = ["checkpoints", "collectives", "data", "evaluation", "features", "job", "training"]

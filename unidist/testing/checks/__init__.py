"""All checks, in the order in which they run."""

from unidist.testing.checks import (
    beside,
    changed_batches,
    checkpoints,
    checkpoints_alike,
    checkpoints_of_all,
    collectives,
    data,
    evaluation,
    features,
    job,
    kept_batches,
    leftovers,
    training,
    unseen,
    weightless,
    weights,
)

__all__ = [
    "beside",
    "changed_batches",
    "checkpoints",
    "checkpoints_alike",
    "checkpoints_of_all",
    "collectives",
    "data",
    "evaluation",
    "features",
    "job",
    "kept_batches",
    "leftovers",
    "training",
    "unseen",
    "weightless",
    "weights",
]

"""What the tests of checkpoints share: arrays to write, and how to compare what was read."""

from pathlib import Path

import numpy as np

from unidist.checkpoint import Checkpoint

ARRAYS = {
    "model/0.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "model/0.bias": np.zeros(3, np.float16),
    "optimizer/velocity/0.weight": np.full((2, 3), 0.5),
}


def same(got: Checkpoint, arrays=ARRAYS):
    assert got.arrays.keys() == arrays.keys()
    for name, array in arrays.items():
        assert got.arrays[name].dtype == array.dtype
        assert got.arrays[name].shape == array.shape
        assert got.arrays[name].tobytes() == array.tobytes()


def files(folder):
    return sorted(path.name for path in Path(folder).iterdir())

"""No checkpoint, however damaged or crafted, ends in anything but CheckpointError, and none changes anything then."""

import os
from pathlib import Path

import pytest

from unidist.testing import Configuration

HERE = Path(__file__).resolve().parent
PATH = os.pathsep.join(filter(None, [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH")]))
ENVIRONMENT = (("PYTHONPATH", PATH),)


# With a share of 1 all of some 4,000 are tried, which takes a minute or two.
@pytest.mark.parametrize(
    ("configuration", "share"),
    [
        (Configuration("torch", "unidist_torch.zoo", 1, environment=ENVIRONMENT), 8),
        (Configuration("torch", "unidist_torch.zoo", 2, environment=ENVIRONMENT), 40),
        (Configuration("mxnet", "unidist_mxnet.zoo", 1, environment=ENVIRONMENT), 6),
        (Configuration("oneflow", "unidist_oneflow.zoo", 1, environment=ENVIRONMENT), 6),
    ],
    ids=str,
)
def test_damaged_checkpoints(tmp_path, configuration, share):
    done = configuration.start("damaged_checkpoints", configuration.zoo, str(tmp_path), str(share))
    assert done.returncode == 0, done.stdout[-6000:]
    assert done.stdout.count("cases") == (4 if configuration.backend == "torch" else 2), done.stdout

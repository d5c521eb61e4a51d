"""The environment that `unidist setup mxnet` builds, which Horovod shares: it is built for MXNet, too.

MXNet 1.9.1 imports with numpy 1.23.5 and no newer one, and so on Python 3.11 and 3.10 only.
"""

from __future__ import annotations

from pathlib import Path

from unidist.plugin import NEEDED, Recipe, Stage

# scikit-learn has the data that the examples train on.
RECIPE = Recipe(
    "shared",
    python=("3.11", "3.10"),
    every=("numpy==1.23.5", "scikit-learn==1.3.2", *NEEDED),
    locks=str(Path(__file__).with_name("locks")),
    stages=(Stage("mxnet", ("mxnet==1.9.1",), probe=str(Path(__file__).with_name("probe.py"))),),
)

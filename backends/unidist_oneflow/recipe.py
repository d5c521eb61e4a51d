"""The environment that `unidist setup oneflow` builds: OneFlow has no wheel above Python 3.10."""

from __future__ import annotations

from pathlib import Path

from unidist.plugin import NEEDED, Recipe, Stage

# scikit-learn has the data that the examples train on.
RECIPE = Recipe(
    "oneflow",
    python=("3.10",),
    every=("numpy==1.23.5", "scikit-learn==1.3.2", *NEEDED),
    locks=str(Path(__file__).with_name("locks")),
    stages=(
        Stage(
            "oneflow",
            ("oneflow==0.9.0", "nvidia-cudnn-cu11==8.5.0.96", "nvidia-cublas-cu11==11.10.3.66"),
            probe=str(Path(__file__).with_name("probe.py")),
            # The wheel is a CUDA build: it does not even load without these, also where there is no GPU.
            library_path=("nvidia/cublas/lib", "nvidia/cudnn/lib"),
        ),
    ),
)

"""The environment that `unidist setup torch` builds: torch runs on every Python that unidist does."""

from __future__ import annotations

from pathlib import Path

from unidist.plugin import NEEDED, Recipe, Stage

STAGE = Stage(
    "torch",
    ("torch==2.13.0",),
    probe=str(Path(__file__).with_name("probe.py")),
    without_gpu=("torch==2.13.0+cpu",),
    otherwise="pip finds no CPU build of torch for this Python, so it takes the CUDA build: 3 GB to download",
)

# scikit-learn has the data that the examples train on.
RECIPE = Recipe(
    "torch",
    python=("3.11", "3.12", "3.10", "3.13"),
    every=("numpy==2.2.6", "scikit-learn==1.7.2", *NEEDED),
    locks=str(Path(__file__).with_name("locks")),
    stages=(STAGE,),
)

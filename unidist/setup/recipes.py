"""What goes into each environment. Data only: versions that were seen to work together, and how they are proven to.

The frameworks pin each other out. torch, MXNet and Horovod agree on Python 3.11 (or 3.10) and numpy 1.23.5, so they
share one environment that grows in stages; OneFlow has no wheel above Python 3.10 and needs its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PROBES = Path(__file__).parent / "probes"


@dataclass(frozen=True)
class SourceBuild:
    """A package that must be built from its source distribution, with changes. The wheel is cached."""

    requirement: str
    tools: tuple[str, ...]  # for the build, beside the environment and not in it
    env: Mapping[str, str]
    replace: tuple[tuple[str, str, str], ...]  # file, text, new text


@dataclass(frozen=True)
class Stage:
    """One framework within an environment. A stage never changes a package that an earlier one installed."""

    name: str
    packages: tuple[str, ...]
    probe: str  # a script in probes/ that ends well only after a collective over two processes
    after: tuple[str, ...] = ()  # stages that must be there first
    build: SourceBuild | None = None
    library_path: tuple[str, ...] = ()  # below site-packages, for LD_LIBRARY_PATH

    @property
    def key(self) -> str:
        """Changes whenever what is installed does."""
        return _hash(self.packages, self.after, self.build)


@dataclass(frozen=True)
class Recipe:
    name: str
    python: tuple[str, ...]  # in order of preference
    stages: tuple[Stage, ...]
    every: tuple[str, ...] = ()  # packages that come before any stage

    @property
    def key(self) -> str:
        """Changes with anything in it: environments of two recipes never share a place."""
        return _hash(self.name, self.every, [(stage.name, stage.key) for stage in self.stages])

    def stage(self, name: str) -> Stage:
        return next(stage for stage in self.stages if stage.name == name)


def _hash(*what: object) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()[:12]


# scikit-learn and its data are what the examples train on; cloudpickle ships functions of a notebook to `launch`.
_EXAMPLES = ("scikit-learn==1.3.2", "cloudpickle>=3", "safetensors")

SHARED = Recipe(
    name="shared",
    python=("3.11", "3.10"),
    every=("numpy==1.23.5", *_EXAMPLES),
    stages=(
        Stage("torch", ("torch==2.13.0",), probe="probe_torch.py"),
        Stage("mxnet", ("mxnet==1.9.1",), probe="probe_mxnet.py"),
        Stage(
            "horovod",
            (),
            probe="probe_horovod.py",
            after=("torch", "mxnet"),
            build=SourceBuild(
                "horovod==0.28.1",
                tools=(
                    "setuptools==69.5.1",
                    "wheel",
                    "packaging",
                    "cloudpickle>=3",
                    "psutil",
                    "pyyaml",
                    "cffi",
                    "cmake<4",
                ),
                env={
                    "HOROVOD_WITH_PYTORCH": "1",
                    "HOROVOD_WITH_MXNET": "1",
                    "HOROVOD_WITHOUT_TENSORFLOW": "1",
                    "HOROVOD_WITH_GLOO": "1",
                    "HOROVOD_WITHOUT_MPI": "1",
                    "HOROVOD_CPU_OPERATIONS": "GLOO",
                },
                replace=(
                    # torch's headers need C++17.
                    ("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)"),
                    ("horovod/torch/CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)"),
                    # As released its list of ranks stays empty over gloo, so no rank is ever found missing in a stall.
                    (
                        "horovod/common/gloo/gloo_controller.cc",
                        "global_ranks_.reserve(size_);",
                        "global_ranks_.resize(size_);",
                    ),
                ),
            ),
        ),
    ),
)

ONEFLOW = Recipe(
    name="oneflow",
    python=("3.10",),
    every=("numpy==1.23.5", *_EXAMPLES),
    stages=(
        Stage(
            "oneflow",
            ("oneflow==0.9.0", "nvidia-cudnn-cu11==8.5.0.96", "nvidia-cublas-cu11==11.10.3.66"),
            probe="probe_oneflow.py",
            # The wheel is a CUDA build: it does not even load without these, also where there is no GPU.
            library_path=("nvidia/cublas/lib", "nvidia/cudnn/lib"),
        ),
    ),
)

DEV = Recipe(
    name="dev",
    python=("3.11", "3.12", "3.10", "3.13"),
    stages=(
        Stage(
            "dev",
            (
                "numpy",
                "pytest>=8",
                "pytest-xdist",
                "hypothesis",
                "ruff",
                "mypy",
                "build",
                "cloudpickle>=3",
                "safetensors",
                "tensorboard",
            ),
            probe="probe_dev.py",
        ),
    ),
)

RECIPES = (SHARED, ONEFLOW, DEV)


def names() -> list[str]:
    return [stage.name for recipe in RECIPES for stage in recipe.stages]


def recipe_of(stage: str) -> Recipe | None:
    return next((recipe for recipe in RECIPES if stage in [each.name for each in recipe.stages]), None)

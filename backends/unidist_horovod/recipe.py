"""What `unidist setup horovod` adds to MXNet's environment: a torch, and Horovod compiled for both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from unidist.plugin import SourceBuild
from unidist_mxnet.recipe import RECIPE as MXNET
from unidist_torch.recipe import STAGE as TORCH

BUILD = SourceBuild(
    "horovod==0.28.1",
    tools=("setuptools==69.5.1", "wheel", "packaging", "cloudpickle>=3", "psutil", "pyyaml", "cffi", "cmake<4"),
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
        ("horovod/common/gloo/gloo_controller.cc", "global_ranks_.reserve(size_);", "global_ranks_.resize(size_);"),
    ),
)

RECIPE = replace(
    MXNET,
    stages=(
        replace(TORCH, name="horovod", probe=str(Path(__file__).with_name("probe.py")), after=("mxnet",), build=BUILD),
    ),
)

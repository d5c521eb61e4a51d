"""What one framework saves another one loads: weights, running statistics and the state of the optimizer, both ways."""

import os
from pathlib import Path

import numpy as np
import pytest

from portable_model import SPECS
from unidist.checkpoint import read
from unidist.testing import Configuration

HERE = Path(__file__).resolve().parent
PATH = os.pathsep.join(filter(None, [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH")]))
ENVIRONMENT = (("PYTHONPATH", PATH),)
ENGINES = {
    "torch_torch": Configuration("torch", "", 2, environment=ENVIRONMENT),
    "mxnet_mxnet": Configuration("mxnet", "", 2, (("kvstore", "dist_sync"),), servers=1, environment=ENVIRONMENT),
    "horovod_mxnet": Configuration("horovod", "", 2, (("framework", "mxnet"),), environment=ENVIRONMENT),
    "oneflow_oneflow": Configuration("oneflow", "", 2, environment=ENVIRONMENT),
}
FIRST = "+torch_torch"
OTHERS = [name for name in ENGINES if name != "torch_torch"]


def run(engine, folder, *sources):
    done = ENGINES[engine].start("portable_model", str(folder), *sources)
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """torch trains; every engine goes on from there; torch goes on from each of these."""
    place = tmp_path_factory.mktemp("portable")
    run("torch_torch", place, "")
    for engine in ENGINES:
        run(engine, place, FIRST)
    run("torch_torch", place, *(f"{FIRST}+{engine}" for engine in OTHERS))
    return place


def said(folder, name, kind, when):
    return np.load(folder / f"{name}-{kind}.{when}.npy")


def largest_difference(one, other):
    return float(np.abs(np.asarray(one, np.float64) - other).max())


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("engine", OTHERS)
def test_torch_is_loaded(folder, engine, kind):
    """The same predictions; and the same training from there, for which the optimizer's state must be there too."""
    trained = said(folder, FIRST, kind, "trained")
    loaded = said(folder, f"{FIRST}+{engine}", kind, "loaded")
    assert largest_difference(loaded, trained) < 1e-5
    theirs, ours = (read(folder / f"{FIRST}+{each}-{kind}").arrays for each in (engine, "torch_torch"))
    theirs, ours = (
        {name: array for name, array in each.items() if name.startswith(("model/", "optimizer/"))}
        for each in (theirs, ours)
    )
    only_torch = {"model/batch.num_batches_tracked"}
    assert theirs.keys() | only_torch == ours.keys() | only_torch
    for name in theirs.keys() & ours.keys() - only_torch:
        if not name.endswith("running_var"):  # MXNet's is of the biased variance
            assert largest_difference(theirs[name].reshape(ours[name].shape), ours[name]) < 1e-5, name


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("engine", OTHERS)
def test_and_back(folder, engine, kind):
    trained = said(folder, f"{FIRST}+{engine}", kind, "trained")
    loaded = said(folder, f"{FIRST}+{engine}+torch_torch", kind, "loaded")
    assert largest_difference(loaded, trained) < 1e-5
    before = said(folder, FIRST, kind, "trained")
    assert largest_difference(loaded, before) > 1e-3  # it has learnt something meanwhile

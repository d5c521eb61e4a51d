"""A suite that cannot fail proves nothing: torch backends with one deliberate fault each, and who notices."""

import os
import re

import pytest

from project import ROOT
from unidist.testing import Configuration, run
from unidist.testing.suite import Skipped, report

FAULTS = {
    "sum_instead_of_mean": (
        "def take_mean_weight(self, model):\n        return super().take_mean_weight(model) / self.world.world_size",
        "mean_gradient",
    ),
    "skipped_broadcast": (
        "def prepare(self, model, optimizer, features):\n"
        "        own = {name: self.to_numpy(tensor) for name, tensor in self.state(model).items()}\n"
        "        prepared = super().prepare(model, optimizer, features)\n"
        "        self.load_state(model, own)\n"
        "        return prepared",
        "same_start",
    ),
    "dropped_sample": (
        "def train_step(self, model, optimizer, loss_fn, compile):\n"
        "        run = super().train_step(model, optimizer, loss_fn, compile)\n"
        "        return lambda batch, *how: run([each[:-1] for each in batch], *how)",
        "mean_gradient",
    ),
    "weights_ignored": (
        "def backward(self, model, loss, micro):\n"
        "        super().backward(model, loss, dataclasses.replace(micro, weight=1.0))",
        "mean_gradient_with_an_uneven_tail",
    ),
    "never_synchronised": (
        "def backward(self, model, loss, micro):\n"
        "        super().backward(model, loss, dataclasses.replace(micro, sync=False))",
        "mean_gradient",
    ),
    "local_clipping_only": (
        "def apply(self, model, optimizer, update):\n"
        "        return super().apply(model, optimizer, update._replace(clip_norm=None))",
        "clipping_by_global_norm",
    ),
    "padding_counted": (
        "def backward(self, model, loss, micro):\n"
        "        super().backward(model, loss, dataclasses.replace(micro, weight=micro.weight or 1.0))",
        "rank_without_samples_reads_ahead",
    ),
    "drift_hidden": (
        "def parameters(self, model):\n        return {}",
        "drift_is_found",
    ),
    "reduced_in_place": (
        "def _own_copy(self, tensor):\n        return tensor",
        "all_reduce_of_native_tensors",
    ),
    "forgotten_momentum": (
        "def load_optimizer_state(self, model, optimizer, arrays, values):\n        return lambda: None",
        "resumed_run_goes_on_as_if_nothing_had_happened",
    ),
    "evaluation_moves_the_model": (
        "@contextlib.contextmanager\n"
        "    def evaluate(self, model):\n"
        "        for parameter in model.parameters():\n"
        "            parameter.data.mul_(1.01)\n"
        "        with super().evaluate(model):\n"
        "            yield",
        "evaluation_does_not_disturb_training",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_noticed(fault, tmp_path):
    body, noticed_by = FAULTS[fault]
    (tmp_path / "faulty.py").write_text(
        "import dataclasses\n"
        "import unidist_torch\n"
        "plugin = dataclasses.replace(unidist_torch.plugin, name='faulty', backend='faulty_backend:Faulty')\n"
    )
    imports = "import contextlib\nimport dataclasses\nfrom unidist_torch.backend import TorchBackend\n"
    (tmp_path / "faulty_backend.py").write_text(f"{imports}class Faulty(TorchBackend):\n    {body}\n")
    info = tmp_path / "faulty-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[unidist.backends]\nfaulty = faulty:plugin\n")
    from unidist.launch.environments import interpreter_for

    python, variables = interpreter_for("torch")
    path = os.pathsep.join([str(tmp_path), variables["PYTHONPATH"]])
    faulty = Configuration(
        "faulty",
        "unidist_torch.zoo",
        2,
        environment=tuple({**variables, "PYTHONPATH": path}.items()),
        python=python,
    )
    outcome = run(faulty, ("every_rank_is_there_once", noticed_by))
    assert outcome["every_rank_is_there_once"] is None, outcome
    assert outcome[noticed_by], f"{noticed_by} did not notice"


CHECKS = """
from unidist.testing.case import DoesNotApply, check
from unidist_torch.zoo import *

@check
def never_applies(case):
    raise DoesNotApply("the moon is not full")

@check
def applies_to_rank_1_only(case):
    if case.rank == 0:
        raise DoesNotApply("rank 0 has no time")

@check
def needs_three(case):
    case.needs_ranks(3)

@check
def needs_what_is_promised(case):
    case.requires("accumulate", "compile")
    assert case.size == 2

@check
def needs_what_is_not_promised(case):
    case.requires("gpu")

@check
def not_promised_and_yet_not_refused(case):
    object.__setattr__(case.strategy.capabilities, "clip_norm", "only on Sundays")
    # Nothing public makes a Strategy break its promise.
    case.strategy._require = lambda capability: None
    case.strategy._trainer.require = lambda capability: None
    case.requires("clip_norm")
"""


def test_what_does_not_apply_is_skipped_on_all_ranks_or_fails(tmp_path):
    (tmp_path / "zoo_with_checks.py").write_text(CHECKS)
    names = tuple(re.findall(r"def (\w+)", CHECKS))
    path = os.pathsep.join([str(tmp_path), str(ROOT), str(ROOT / "backends")])
    outcome = run(Configuration("torch", "zoo_with_checks", 2, environment=(("PYTHONPATH", path),)), names)
    assert isinstance(outcome["never_applies"], Skipped)
    with pytest.raises(pytest.skip.Exception, match="the moon is not full"):
        report(outcome["never_applies"])
    assert isinstance(outcome["needs_three"], Skipped)
    assert outcome["needs_what_is_promised"] is None
    assert "does not promise gpu here: written for CUDA" in outcome["needs_what_is_not_promised"]
    for name, words in (
        ("applies_to_rank_1_only", "skipped: rank 0 has no time"),
        ("not_promised_and_yet_not_refused", "UnsupportedOperation was not raised"),
    ):
        assert not isinstance(outcome[name], Skipped)
        with pytest.raises(AssertionError, match=words):
            report(outcome[name])

"""A suite that cannot fail proves nothing: torch backends with one deliberate fault each, and who notices."""

import os

import pytest

from unidist.testing import Configuration, run

FAULTS = {
    "sum_instead_of_mean": (
        "def backward(self, model, loss, weight):\n"
        "        super().backward(model, loss, weight * self.world.world_size)",
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
        "def backward(self, model, loss, weight):\n        super().backward(model, loss, 1.0)",
        "mean_gradient_with_an_uneven_tail",
    ),
    "never_synchronised": (
        "def forward(self, model, sync):\n        return model.no_sync()",
        "mean_gradient",
    ),
    "local_clipping_only": (
        "def apply(self, model, optimizer, update):\n"
        "        super().apply(model, optimizer, update._replace(clip_norm=None))",
        "clipping_by_global_norm",
    ),
    "reduced_in_place": (
        "def _own_copy(self, tensor):\n        return tensor",
        "all_reduce_of_native_tensors",
    ),
    "forgotten_momentum": (
        "def load_optimizer_state(self, model, optimizer, arrays, values):\n        pass",
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
    (tmp_path / "faulty_backend.py").write_text(
        f"import contextlib\nfrom unidist_torch.backend import TorchBackend\nclass Faulty(TorchBackend):\n    {body}\n"
    )
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

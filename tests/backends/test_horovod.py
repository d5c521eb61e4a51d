"""Horovod keeps every promise at world sizes 1, 2 and 3, for torch and for MXNet models; below, what only it has."""

import os
from pathlib import Path

import pytest
from test_torch import TORCH_MODELS, TORCH_STATES

from project import ROOT
from unidist.testing import Configuration, conformance, run
from unidist.testing.suite import report, resume

TORCH, MXNET = "unidist_torch.zoo", "unidist_mxnet.zoo"

test_promises_on_torch = conformance("horovod", zoo=TORCH, world_sizes=(2,), framework="torch")
test_promises_on_torch_of_1_and_3 = conformance(
    "horovod", zoo=TORCH, world_sizes=(1, 3), one_launch=True, framework="torch"
)
test_promises_on_mxnet = conformance("horovod", zoo=MXNET, world_sizes=(2,), framework="mxnet")
test_promises_on_mxnet_of_1_and_3 = conformance(
    "horovod", zoo=MXNET, world_sizes=(1, 3), one_launch=True, framework="mxnet"
)


def test_resumes_on_another_number_of_ranks():
    resume(Configuration("horovod", TORCH, 3, (("framework", "torch"),)), 2)


GLUON = (
    "deferred_initialisation",
    "deferred_initialisation_spelled_out",
    "native_optimizers",
    "trainer_is_ours_after_prepare",
    "rate_set_by_hand",
    "gradient_of_a_parameter_that_was_not_used",
    "gradients_of_one_layer_cleared_in_a_group",
    "uneven_batches_with_every_kind_of_update",
    "native_optimizer_and_uneven_batches",
    "gradients_made_anew_between_steps",
    "backward_before_prepare_of_a_static_graph",
    "values_set_between_steps",
    "wait_for_the_queue_that_is_interrupted",
    "arrays_made_anew_while_gradients_travel",
    "trainers_after_the_end",
    "weights_of_very_different_size",
    "backward_of_ones_own_with_one_model",
    "backward_of_ones_own_through_a_layer_that_the_loss_leaves_out",
    "flush_after_a_backward_of_ones_own",
    "gradients_clipped_by_hand",
    "gradients_that_are_looked_at",
    "gradients_kept_while_another_model_is_trained",
    "parameters_of_two_models",
    "parameters_of_float16_are_loaded",
    "parameters_of_float16_are_averaged",
    "values_loaded_into_a_prepared_model",
    "large_collectives",
    "ranks_that_disagree_over_horovod",
    "collectives_in_pieces_over_horovod",
    "convolutions_whose_shapes_come_late",
    "trainers_of_ones_own_are_refused",
    "frozen_for_a_while",
    "steps_that_nobody_waits_for_are_not_queued",
    "one_row_for_batch_normalisation",
)


OWN = (
    "parameters_that_no_rank_used",
    "parameters_that_one_rank_used",
    "gradients_that_no_rank_has",
    "buffers_outside_the_state",
    "layers_thawed_and_frozen_later",
    "parameters_of_two_dtypes",
    "bfloat16_averaged_by_hand",
    "parameters_without_elements",
    "ranks_that_disagree",
    "collectives_in_pieces",
    "dtypes_that_nothing_adds_up",
)


@pytest.mark.parametrize("name", GLUON)
def test_what_only_gluon_has(name):
    further_check("mxnet", "mxnet_checks", GLUON, name)


@pytest.mark.parametrize("name", OWN)
def test_torch_beyond_the_promises(name):
    further_check("torch", "horovod_checks", OWN, name)


@pytest.mark.parametrize("name", TORCH_MODELS)
def test_torch_models_beyond_the_promises(name):
    further_check("torch", "torch_checks", TORCH_MODELS, name)


@pytest.mark.parametrize("name", TORCH_STATES)
def test_what_torch_keeps(name):
    further_check("torch", "torch_state_checks", TORCH_STATES, name)


def further_check(framework, zoo, names, name):
    path = os.pathsep.join([str(Path(__file__).parent), str(ROOT)])
    options = (("framework", framework),)
    report(run(Configuration("horovod", zoo, 2, options, environment=(("PYTHONPATH", path),)), names)[name])

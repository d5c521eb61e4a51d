"""The MXNet backend keeps every promise in every mode, on real ps-lite clusters of schedulers, servers and workers."""

import os
from pathlib import Path

import pytest

from unidist.testing import Configuration, conformance, run
from unidist.testing.suite import report, resume

HERE = Path(__file__).resolve().parent
ZOO = "unidist_mxnet.zoo"

test_dist_sync = conformance("mxnet", zoo=ZOO, world_sizes=(2,), servers=1, kvstore="dist_sync")
test_one_worker_alone = conformance("mxnet", zoo=ZOO, world_sizes=(1,), one_launch=True)
test_one_worker_with_a_server = conformance(
    "mxnet", zoo=ZOO, world_sizes=(1,), servers=1, one_launch=True, kvstore="dist_sync"
)
test_four_devices = conformance("mxnet", zoo=ZOO, world_sizes=(1,), one_launch=True, kvstore="device", devices=4)
test_two_devices = conformance(
    "mxnet", zoo=ZOO, world_sizes=(2,), servers=1, one_launch=True, kvstore="dist_sync", devices=2
)
test_dist_sync_3 = conformance("mxnet", zoo=ZOO, world_sizes=(3,), servers=2, one_launch=True, kvstore="dist_sync")
test_dist_device_sync = conformance(
    "mxnet", zoo=ZOO, world_sizes=(1, 2), servers=1, one_launch=True, kvstore="dist_device_sync"
)
test_dist_device_sync_3 = conformance(
    "mxnet", zoo=ZOO, world_sizes=(3,), servers=2, one_launch=True, kvstore="dist_device_sync"
)
# A bound of 20 elements: the model's matrices are shared out over both servers, its vectors are not.
test_updates_on_two_servers = conformance(
    "mxnet",
    zoo=ZOO,
    world_sizes=(2,),
    servers=2,
    one_launch=True,
    kvstore="dist_sync",
    update_on="server",
    bigarray_bound=20,
)
test_dist_async = conformance("mxnet", zoo=ZOO, world_sizes=(1, 2), servers=1, one_launch=True, kvstore="dist_async")
test_dist_async_3 = conformance("mxnet", zoo=ZOO, world_sizes=(3,), servers=2, one_launch=True, kvstore="dist_async")


def test_resumes_on_another_number_of_workers():
    resume(Configuration("mxnet", ZOO, 2, (("kvstore", "dist_sync"),), servers=1), 1)


# -- what only MXNet has ---------------------------------------------------------------------------------------

BESIDE = (
    "convolutions_whose_shapes_come_late",
    "trainers_of_ones_own_are_refused",
    "frozen_for_a_while",
    "steps_that_nobody_waits_for_are_not_queued",
    "one_row_for_batch_normalisation",
)
EVERYWHERE = (
    "deferred_initialisation",
    "deferred_initialisation_spelled_out",
    "deferred_initialisation_after_a_bad_start",
    "native_optimizers",
    "native_schedules",
    "optimizers_that_would_go_wrong_are_refused",
    "trainer_is_ours_after_prepare",
    "rate_that_is_zero_for_a_while",
    "gradients_are_whole_while_the_rate_is_zero",
    "rate_set_by_hand",
    "factors_of_parameters",
    "gradient_of_a_parameter_that_was_not_used",
    "frozen_or_unfrozen_too_late",
    "values_loaded_into_a_prepared_model",
    "io_iterators",
    "gradients_of_one_layer_cleared_in_a_group",
    "uneven_batches_with_every_kind_of_update",
    "native_optimizer_and_uneven_batches",
    "parameters_of_float16_are_loaded",
    "velocity_of_another_framework_is_saved_again",
    "gradients_made_anew_between_steps",
    "backward_before_prepare_of_a_static_graph",
    "values_set_between_steps",
    "wait_for_the_queue_that_is_interrupted",
    "trainers_after_the_end",
    "weights_of_very_different_size",
    "backward_of_ones_own_with_one_model",
    "backward_of_ones_own_through_a_layer_that_the_loss_leaves_out",
    "flush_after_a_backward_of_ones_own",
    "gradients_clipped_by_hand",
    "gradients_that_are_looked_at",
    "gradients_kept_while_another_model_is_trained",
    *BESIDE,
)
CASES = {
    (("kvstore", "dist_sync"),): (
        *EVERYWHERE,
        "parameters_of_two_models",
        "rate_set_by_hand_comes_back",
        "models_that_cannot_be_trained_are_refused",
        "large_collectives",
        "arrays_of_mx_np",
        "arrays_made_anew_while_gradients_travel",
        "averages_by_hand_wait_for_each_other",
        "nadam_resumes",
        "parameters_of_float16_are_averaged",
        "momentum_that_is_new",
        "scale_that_the_model_does_not_look_at",
        "io_iterators_shuffle_and_augment_anew",
        "io_iterators_that_cannot_be_shared_out_are_refused",
    ),
    (("kvstore", "dist_sync"), ("update_on", "server")): (
        *EVERYWHERE,
        "norms_of_parts_are_refused",
        "settings_of_servers_that_are_changed_too_late",
    ),
    (("kvstore", "dist_async"),): (
        "slow_worker_holds_nobody_back",
        "each_gradient_is_applied_by_itself",
        "rate_does_not_overtake_gradients",
        "velocity_in_dist_async_while_the_rate_is_zero",
        "evaluation_inside_a_group_of_dist_async",
        "flush_in_dist_async",
        "checkpoint_of_dist_async",
        "staleness_is_counted",
        "io_iterators_end_each_on_its_own",
        "values_loaded_into_a_prepared_model",
        *BESIDE,
    ),
    (("kvstore", "dist_sync"), ("compression", "2bit"), ("compression_threshold", 0.02)): ("compressed_to_two_bits",),
    (("kvstore", "dist_async"), ("compression", "2bit"), ("compression_threshold", 0.02)): (
        "compressed_in_dist_async",
        "values_that_would_be_compressed_are_refused",
    ),
}


@pytest.mark.parametrize(
    ("options", "name"),
    [(options, name) for options, names in CASES.items() for name in names],
    ids=lambda each: "-".join(str(value) for _, value in each) if isinstance(each, tuple) else each,
)
def test_mxnet(options, name):
    path = os.pathsep.join(filter(None, [str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH")]))
    servers = 2 if ("update_on", "server") in options else 1
    environment = (("PYTHONPATH", path),)
    zoo = (
        "mxnet_async_checks" if {("kvstore", "dist_async"), ("compression", "2bit")} & set(options) else "mxnet_checks"
    )
    configuration = Configuration("mxnet", zoo, 2, options, servers=servers, environment=environment)
    report(run(configuration, CASES[options])[name])

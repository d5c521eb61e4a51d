"""What is asked of a Gluon block and of an optimizer before training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mxnet as mx
from mxnet import gluon

from unidist.plugin import OptimizerSpec, StateError, UnsupportedOperation, UsageError

NADAM = (
    "MXNet's Nadam has one schedule for all parameters, which moves on with the update of each: use one device in "
    "each worker and update_on='worker' with dist_sync, or unidist.Adam"
)


def check_model(model: Any) -> None:
    if not isinstance(model, gluon.Block):
        raise UsageError(f"the mxnet backend prepares a gluon.Block, not an object of type {type(model).__name__}")
    for name, parameter in collect(model).items():
        if parameter._data is None and not parameter._deferred_init:
            raise UsageError(f"parameter {name} has no values: call model.initialize(mx.init.Xavier()) first")
        if parameter._stype != "default" or parameter._grad_stype != "default":
            raise UsageError(
                f"parameter {name} is sparse, which this backend does not train: use dense ones, such as "
                "Embedding(…, sparse_grad=False)"
            )


def collect(model: Any) -> dict[str, Any]:
    """Parameters by their place in the model ("0.weight"), which does not depend on how many were made before."""
    named: dict[str, Any] = model._collect_params_with_prefix()
    return named


def fixed_scales(model: Any) -> list[Any]:
    """The parameters of batch normalisations whose values MXNet does not look at: it takes ones for them."""
    found: list[Any] = []

    def look(block: Any) -> None:
        if getattr(block, "_kwargs", {}).get("fix_gamma") and "gamma" in block._reg_params:
            found.append(block._reg_params["gamma"])

    model.apply(look)
    return found


def is_deferred(parameter: Any) -> bool:
    return parameter._data is None


def check_optimizer(optimizer: Any, parameters: Mapping[str, Any]) -> mx.optimizer.Optimizer | None:
    """The mx.optimizer inside, None for a spec. One made for another copy of the model would move nothing."""
    if optimizer is None or isinstance(optimizer, OptimizerSpec):
        return None
    native = optimizer._optimizer if isinstance(optimizer, gluon.Trainer) else optimizer
    if isinstance(native, mx.optimizer.Optimizer) and (native.lr_mult or native.wd_mult):
        raise UsageError(
            "Gluon does not look at the lr_mult and wd_mult of an optimizer: set those of the parameters, as in "
            "model.collect_params('.*bias').setattr('wd_mult', 0)"
        )
    if native is optimizer and isinstance(native, mx.optimizer.Optimizer):
        return native
    if not isinstance(optimizer, gluon.Trainer):
        raise UsageError(
            f"the optimizer is of type {type(optimizer).__name__}: pass unidist.SGD/Adam/AdamW, an mx.optimizer one, "
            "or a gluon.Trainer"
        )
    if optimizer._kv_initialized:
        raise StateError("this Trainer has made steps already: pass it to prepare() before its first one")
    ours = {id(parameter) for parameter in parameters.values()}
    strangers = sum(id(param) not in ours for param in optimizer._params)
    if strangers:
        raise UsageError(
            f"{strangers} of the Trainer's {len(optimizer._params)} parameters are not the model's: make it from this "
            "model's collect_params()"
        )
    held = {id(param) for param in optimizer._params}
    for parameter in parameters.values():
        if parameter.grad_req != "null" and id(parameter) not in held:
            raise UsageError(
                f"the Trainer does not hold the model's parameter {parameter.name}: set its grad_req to 'null' to "
                "freeze it, or make the Trainer from all of collect_params()"
            )
    if optimizer._compression_params:
        raise UsageError(
            "the Trainer has compression_params, and a Strategy a store of its own: say the option compression='2bit', "
            "as in `unidist run --backend mxnet --option compression=2bit …`"
        )
    return native


def check_for_workers(optimizer: Any, native: Any, workers: int, devices: int) -> None:
    """That each worker, and device, making the update by itself comes to the same."""
    if isinstance(optimizer, gluon.Trainer) and optimizer._kvstore_params["update_on_kvstore"]:
        raise UsageError(
            "the Trainer asks for update_on_kvstore: say the mxnet backend's option update_on='server' instead"
        )
    if isinstance(native, mx.optimizer.SGLD) and workers * devices > 1:
        raise UnsupportedOperation(
            "SGLD adds noise, which would be another on every worker and device: update_on='server' of the "
            "mxnet backend does it once"
        )
    if isinstance(native, mx.optimizer.Nadam) and devices > 1:
        raise UnsupportedOperation(NADAM)


def check_for_servers(optimizer: Any, native: Any) -> None:
    if isinstance(optimizer, gluon.Trainer) and optimizer._kvstore_params["update_on_kvstore"] is False:
        raise UsageError("the Trainer says update_on_kvstore=False: say the option update_on='worker', with dist_sync")
    if isinstance(native, mx.optimizer.Nadam):
        raise UnsupportedOperation(NADAM)

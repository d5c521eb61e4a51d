"""How a user would ask for each thing that a backend may not promise: it must be refused then, never skipped over."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from unidist.compression import PowerSGD, TopK
from unidist.optim import SGD

if TYPE_CHECKING:
    from unidist.testing.case import Case


def _prepare(case: Case, **features: Any) -> Any:
    return case.strategy.prepare(case.mlp(), SGD(0.1), **features)


def _step(case: Case, **how: Any) -> Any:
    model, optimizer = _prepare(case)
    return case.strategy.train_step(model, optimizer, case.zoo.cross_entropy, **how)


def _spelled_out(case: Case) -> None:
    with case.strategy.forward():
        pass


def _native_optimizer(case: Case) -> None:
    model = case.mlp()
    case.strategy.prepare(model, case.zoo.native_sgd(model, 0.1))


def _save(case: Case) -> None:
    model, optimizer = _prepare(case)
    case.strategy.save(case.folder / "refused", model=model, optimizer=optimizer)


def _sync_batchnorm(case: Case) -> None:
    case.strategy.prepare(case.zoo.with_buffers(), SGD(0.1), sync_batchnorm=True)


# capability -> every way to ask for it. What is missing here is not asked for: it is what a step means, or a device.
ASKING: dict[str, tuple[Callable[[Case], Any], ...]] = {
    "spelled_out": (_spelled_out,),
    "accumulate": (lambda case: _prepare(case, accumulate=2),),
    "clip_norm": (lambda case: _step(case, clip_norm=1.0),),
    "native_optimizer": (_native_optimizer,),
    "optimizer_state": (_save,),
    "native_loader": (lambda case: case.strategy.loader(range(8), per_device_batch=2),),
    "sync_batchnorm": (_sync_batchnorm,),
    "mixed_precision": (
        lambda case: _prepare(case, precision="bf16"),
        lambda case: _prepare(case, precision="fp16"),
    ),
    "compression": (
        lambda case: _prepare(case, compression="fp16"),
        lambda case: _prepare(case, compression=TopK(0.25)),
        lambda case: _prepare(case, compression=PowerSGD(rank=1, start=2)),
    ),
    "local_sgd": (
        lambda case: _prepare(case, sync_every=2),
        lambda case: case.strategy.average_parameters(case.mlp()),
        lambda case: case.strategy.average_gradients(case.mlp()),
    ),
    "compile": (lambda case: _step(case, compile=True),),
}

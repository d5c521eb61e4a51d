"""Models made ready to train, and their steps: whole, or spelled out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from unidist.interface.process import Process
from unidist.training.settings import Settings

if TYPE_CHECKING:
    from unidist.compression import Compression
    from unidist.optim import OptimizerSpec
    from unidist.training.accumulation import Reduction

ModelT = TypeVar("ModelT")
OptimizerT = TypeVar("OptimizerT")


class Training(Process):
    @overload
    def prepare(
        self,
        model: ModelT,
        optimizer: None = ...,
        *,
        accumulate: int = ...,
        sync_every: int = ...,
        sync_batchnorm: bool = ...,
        precision: Literal["bf16", "fp16"] | None = ...,
        compression: Compression | None = ...,
        check_every: int = ...,
    ) -> ModelT: ...

    @overload
    def prepare(
        self,
        model: ModelT,
        optimizer: OptimizerSpec,
        *,
        accumulate: int = ...,
        sync_every: int = ...,
        sync_batchnorm: bool = ...,
        precision: Literal["bf16", "fp16"] | None = ...,
        compression: Compression | None = ...,
        check_every: int = ...,
    ) -> tuple[ModelT, Any]: ...

    @overload
    def prepare(
        self,
        model: ModelT,
        optimizer: OptimizerT,
        *,
        accumulate: int = ...,
        sync_every: int = ...,
        sync_batchnorm: bool = ...,
        precision: Literal["bf16", "fp16"] | None = ...,
        compression: Compression | None = ...,
        check_every: int = ...,
    ) -> tuple[ModelT, OptimizerT]: ...

    def prepare(
        self,
        model: Any,
        optimizer: Any = None,
        *,
        accumulate: int = 1,
        sync_every: int = 1,
        sync_batchnorm: bool = False,
        precision: Literal["bf16", "fp16"] | None = None,
        compression: Compression | None = None,
        check_every: int = 0,
    ) -> Any:
        """Make the model ready to train: on the device, equal to rank 0's everywhere, gradients averaged.

        `optimizer` is `unidist.SGD`, `Adam`, `AdamW` or a native one that holds the model's parameters. Returns the
        native (model, optimizer), or the model alone when no optimizer was given.

        accumulate      gradients of so many batches make one update, and so does an incomplete group at the end of
                        a pass; the loop does not change
        sync_every      local SGD: ranks go their own ways and average parameters after every so many updates and at
                        the end of a pass; 0 leaves it to your calls of average_gradients and average_parameters
        sync_batchnorm  batch normalisation over the global batch
        precision       "bf16" or "fp16" in the forward pass; the loss is scaled where fp16 needs it
        compression     of gradients on their way: "fp16", "bf16", `unidist.TopK`, `unidist.PowerSGD`
        check_every     compare the parameters over ranks after every so many updates, too; a difference is an error
                        that names the parameter. They are compared by `save`, and as often as costs 1 % of the time
        """
        self._require_open()
        from unidist.optim import OptimizerSpec
        from unidist.training.same_start import compare_ranks

        settings = Settings(accumulate, sync_every, sync_batchnorm, precision, compression, check_every)
        settings.check(optimizer, self._require)
        self._backend.check_prepare(model, optimizer)
        hyperparameters: Mapping[str, object] = {}
        if optimizer is not None:
            hyperparameters = (
                vars(optimizer) if isinstance(optimizer, OptimizerSpec) else self._backend.settings(optimizer)
            )
        compared = {"optimizer": type(optimizer).__name__, **hyperparameters, **vars(settings)}
        notice = compare_ranks(self._backend.state(model), self._backend.to_numpy, self._collectives, compared)
        if notice and self.is_main:
            self._say(f"unidist: {notice}")
        return self._trainer.prepare(model, optimizer, settings)

    def train_step(
        self,
        model: Any,
        optimizer: Any,
        loss_fn: Callable[..., Any],
        *,
        clip_norm: float | None = None,
        compile: bool = False,
        reduction: Reduction = "mean",
    ) -> Callable[..., Any]:
        """One callable for the whole step: `step(x, y)` computes `loss_fn(model, x, y)`, and trains on it.

        A batch weighs as many samples as it has rows, or as `step(x, y, weight=n)` says: the number of samples, or of
        tokens, that the loss is the mean of on this rank. The gradient is that of the mean over all of them, on all
        ranks and micro-batches. `reduction="sum"` says that the loss is a sum: then so is the gradient.

        It returns this rank's share of the loss: `strategy.mean` of it is the mean over the global batch, also when
        the ranks' batches differ in size. (Of accumulated batches that no loader knows, it is the mean over this rank's
        batch.) `compile` hands the model to the framework's compiler.
        """
        self._require_open()
        return self._trainer.train_step(model, optimizer, loss_fn, clip_norm, compile, reduction)

    def forward(self, model: Any = None) -> AbstractContextManager[None]:
        """The spelled-out step, first part: compute the loss inside. Name the model when several are prepared.

        What the model is called with tells how many samples the batch has.
        """
        self._require_open()
        return self._spelled_out.forward(model)

    def backward(self, loss: Any, *, weight: Any = None, reduction: Reduction = "mean") -> None:
        """The spelled-out step, second part: gradients of the mean over all ranks.

        `weight` is the number of samples that the loss is the mean of; not given, the number of rows that the model was
        called with. `reduction="sum"`: the loss is a sum.
        """
        self._require_open()
        self._spelled_out.backward(loss, weight, reduction)

    def step(self, optimizer: Any, *, clip_norm: float | None = None) -> bool:
        """The spelled-out step, last part: clip, apply, clear. True when an update was made."""
        self._require_open()
        return self._spelled_out.step(optimizer, clip_norm)

    def flush(self, model: Any, optimizer: Any, *, clip_norm: float | None = None) -> bool:
        """Make an update of a group that accumulation has begun and not finished, as after `break`; False if none is.

        Every rank calls it. The end of a pass does this by itself.
        """
        self._require_open()
        return self._trainer.flush(model, optimizer, clip_norm)

    def average_gradients(self, model: Any) -> None:
        """Replace every gradient by its mean over ranks, between backward and step: for `prepare(…, sync_every=0)`."""
        self._average(model, "gradients")

    def average_parameters(self, model: Any) -> None:
        """Replace every parameter by its mean over ranks: the end of a stretch of local SGD."""
        self._average(model, "parameters")

    def _average(self, model: Any, what: Literal["gradients", "parameters"]) -> None:
        self._require_open()
        self._require("local_sgd")
        with self._watch.within(f"average {what}"):
            self._backend.average(model, what)
        if what == "parameters":
            self._trainer.brought_together(model)

    def unwrap(self, model: Any) -> Any:
        """Your own model inside what `prepare` returned."""
        return self._backend.unwrap(model)

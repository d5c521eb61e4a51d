"""torch models, optimizers and their steps, whatever carries the gradients: what every backend on torch shares."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from unidist.plugin import (
    Backend,
    CheckpointError,
    Features,
    MicroBatch,
    NativeLoader,
    OptimizerSpec,
    StateError,
    UnsupportedOperation,
    Update,
    UsageError,
    World,
    check_tied,
)
from unidist_torch import batchnorm, generators, loading, optimizer_state
from unidist_torch.checks import check_model, check_optimizer, check_parameters
from unidist_torch.devices import pick_device
from unidist_torch.held import SHARED, Held
from unidist_torch.hooks import InputHook, adding_nothing
from unidist_torch.specs import native_optimizer
from unidist_torch.step_guard import StepGuard


class TorchModels(Backend):
    """All of the contract but meeting, collectives, `prepare` and the exchange of gradients."""

    framework = "torch"

    def __init__(self, world: World, options: Any, device: str | None) -> None:
        self.world, self.options = world, options
        self.device = pick_device(device, torch.cuda.device_count(), world, os.environ.get("CUDA_VISIBLE_DEVICES"))
        self._device = torch.device(self.device)
        self.version = torch.__version__
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._from_spec: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers whose settings the user's code holds
        self._precision: weakref.WeakKeyDictionary[Any, torch.dtype] = weakref.WeakKeyDictionary()
        self._scalers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # model -> GradScaler
        self._held: weakref.WeakKeyDictionary[Any, Held] = weakref.WeakKeyDictionary()  # by model that is trained
        self._buffers: weakref.WeakKeyDictionary[Any, list[weakref.ref[Any]]] = weakref.WeakKeyDictionary()
        self._micro = MicroBatch()  # of the step under way
        self._guard = StepGuard()

    def close(self, failed: bool) -> None:
        self._guard.close()

    # -- tensors

    def is_tensor(self, value: object) -> bool:
        return isinstance(value, torch.Tensor)

    def to_numpy(self, tensor: torch.Tensor) -> np.ndarray:
        tensor = tensor.detach()
        if tensor.dtype == torch.bfloat16:  # numpy has none; float32 holds every value of it
            tensor = tensor.float()
        return np.array(tensor.cpu().numpy())

    def from_numpy(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)

    def _own_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(self._device).clone(memory_format=torch.contiguous_format)

    # -- models

    def check_prepare(self, model: Any, optimizer: Any) -> None:
        check_model(model)
        check_parameters(model, trained=optimizer is not None)
        if isinstance(optimizer, OptimizerSpec):
            if not any(parameter.requires_grad for parameter in model.parameters()):
                raise UsageError("the model has no parameter that requires a gradient: nothing to optimize")
        elif optimizer is not None:
            check_optimizer(optimizer, model)

    def check_optimizer(self, model: Any, optimizer: Any) -> None:
        self._guard.check_groups(optimizer, model)

    def ready(
        self, model: Any, optimizer: Any, features: Features, all_reduce: Callable[[Any], Any] | None = None
    ) -> tuple[Any, Any]:
        """The model on the device and the optimizer as torch has them. `all_reduce` is a differentiable sum
        for batch normalisation over ranks; None: torch.distributed's."""
        if features.sync_batchnorm:
            model = batchnorm.convert(model, self._device.type == "cuda", lambda: self._micro.weight == 0, all_reduce)
        batchnorm.explain_single_rows(model, self.world)
        model.to(self._device)
        model.zero_grad()
        if isinstance(optimizer, OptimizerSpec):
            trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
            optimizer = native_optimizer(optimizer, trainable)
            self._from_spec.add(optimizer)
        if optimizer is not None:
            self._guard.watch(optimizer)
            self._held[model] = Held(model)
        if self.world.world_size > 1 and not features.local:
            self._guard.keep_equal(model)
        return model, optimizer

    def set_precision(self, model: Any, features: Features) -> None:
        if features.precision is not None:
            self._precision[model] = {"bf16": torch.bfloat16, "fp16": torch.float16}[features.precision]
            if features.precision == "fp16":  # its small gradients would vanish
                self._scalers[model] = torch.amp.GradScaler(self._device.type)

    def unwrap(self, model: Any) -> Any:
        return model

    def state(self, model: Any) -> Mapping[str, torch.Tensor]:
        check_model(model)
        state: dict[str, torch.Tensor] = self.unwrap(model).state_dict()
        for name, value in state.items():
            if not isinstance(value, torch.Tensor) or name.rpartition(".")[2] == "_extra_state":
                raise UnsupportedOperation(
                    f"the module's {name} is no parameter or buffer, and ranks share, and checkpoints hold, nothing "
                    "else: keep it in a buffer (register_buffer) in place of get_extra_state, or among your own values"
                )
        return state

    def check_state(self, model: Any, arrays: Mapping[str, np.ndarray], filled: Collection[str]) -> None:
        check_tied(arrays, self.unwrap(model).state_dict(keep_vars=True))
        for name, module in self.unwrap(model).named_modules():
            count = f"{name}.num_batches_tracked".lstrip(".")
            if count in filled and isinstance(module, _BatchNorm) and module.momentum is None:
                raise CheckpointError(
                    f"{count} is missing, and without a momentum the layer's running statistics depend on it"
                )

    def parameters(self, model: Any) -> Mapping[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}

    def load_state(self, model: Any, arrays: Mapping[str, np.ndarray]) -> None:
        state = self.state(model)
        with torch.no_grad():
            for name, array in arrays.items():
                state[name].copy_(torch.from_numpy(np.array(array)))

    def settings(self, optimizer: Any) -> dict[str, object]:
        groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else []
        plain = (bool, int, float, tuple)
        return {f"{k} {i}": v for i, group in enumerate(groups) for k, v in group.items() if isinstance(v, plain)}

    def optimizer_state(self, model: Any, optimizer: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        return optimizer_state.read(self.unwrap(model), optimizer, self._scalers.get(model))

    def load_optimizer_state(
        self, model: Any, optimizer: Any, arrays: Mapping[str, np.ndarray], values: Mapping[str, Any]
    ) -> Callable[[], None]:
        # torch's habit: the settings of a native optimizer come from the checkpoint.
        with_settings = optimizer not in self._from_spec
        return optimizer_state.load(
            self.unwrap(model), optimizer, arrays, values, with_settings, self._scalers.get(model), self._device
        )

    def rng_state(self) -> dict[str, np.ndarray]:
        return generators.read(self._device)

    def load_rng_state(self, arrays: Mapping[str, np.ndarray]) -> Callable[[], None]:
        return generators.load(arrays, self._device)

    @contextmanager
    def evaluate(self, model: Any) -> Iterator[None]:
        bare = self.unwrap(model)
        modes = [(module, module.training) for module in bare.modules()]
        self.share_buffers(bare)  # running statistics differ between ranks; evaluation must not
        bare.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module, training in modes:  # one by one: the user may keep some layers in evaluation mode
                module.training = training

    def share_buffers(self, model: Any) -> None:
        """Give every rank the buffers of rank 0, in one broadcast for each dtype."""
        if model not in self._buffers:  # to look for them in every step would cost more with every layer
            owners = [module for module in model.modules() if module._buffers]
            self._buffers[model] = [weakref.ref(module) for module in owners]
        owners = [module for reference in self._buffers[model] if (module := reference()) is not None]
        held = {id(buffer): buffer for module in owners for buffer in module._buffers.values() if buffer is not None}
        buffers = [tensor for tensor in held.values() if tensor.numel()]  # the model may have assigned new ones
        for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
            alike = [buffer for buffer in buffers if buffer.dtype == dtype]
            flat = self.broadcast(torch.cat([tensor.reshape(-1) for tensor in alike]), 0)
            for buffer, part in zip(alike, flat.split([tensor.numel() for tensor in alike]), strict=True):
                buffer.copy_(part.view_as(buffer))

    def clear_gradients(self, model: Any) -> None:
        self._held[model].clear()

    @contextmanager
    def keep_gradients(self, model: Any, other: Any) -> Iterator[None]:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not {id(parameter) for parameter in other.parameters()}.isdisjoint(map(id, trained)):
            raise StateError(SHARED)
        held = [parameter.grad for parameter in trained]
        for parameter in trained:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in zip(trained, held, strict=True):
                parameter.grad = gradient

    def average(self, model: Any, what: Literal["gradients", "parameters"]) -> None:
        """A gradient that no rank has stays None: zeros would let momentum and weight decay move its parameter."""
        held = self._held.get(model) if what == "gradients" else None
        if held is not None:
            with self._giving_up(model):
                held.check_present()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if what == "gradients":
            used = self.all_reduce(torch.tensor([parameter.grad is not None for parameter in trained]), "max").tolist()
            trained = [parameter for parameter, anywhere in zip(trained, used, strict=True) if anywhere]
            for parameter in trained:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        tensors = [p.grad if what == "gradients" else p.data for p in trained]
        for dtype in dict.fromkeys(t.dtype for t in tensors):
            self.average_alike([t for t in tensors if t.dtype == dtype], f"average {what} of {dtype}")
        if held is not None:
            held.averaged()

    def average_alike(self, tensors: list[torch.Tensor], what: str) -> None:
        """Replace each by its mean over ranks. They are of one dtype, in the same order on all ranks."""
        raise NotImplementedError

    # -- a training step

    def on_inputs(self, model: Any, listener: Callable[[tuple[Any, ...]], None]) -> None:
        model.register_forward_pre_hook(InputHook(listener), with_kwargs=True)

    def in_group(self, model: Any) -> bool:
        """Gradients have been accumulated that no update has used yet."""
        return self._held[model].in_group

    def forward(self, model: Any, micro: MicroBatch) -> AbstractContextManager[None]:
        self._micro = micro
        if model in self._precision:
            lowered: AbstractContextManager[None] = torch.autocast(self._device.type, self._precision[model])
            return lowered
        return nullcontext()

    def backward(self, model: Any, loss: torch.Tensor, micro: MicroBatch) -> None:
        if not loss.requires_grad:
            raise UsageError("the loss has no gradient: compute it from the model's parameters, and do not detach it")
        held = self._held[model]
        held.check()
        if micro.weight != 1.0:
            loss = loss * micro.weight
        if model in self._scalers:
            loss = self._scalers[model].scale(loss)
        with nullcontext() if micro.weight else adding_nothing(model):
            self.differentiate(model, loss, micro)
        if micro.sync:
            held.mean_weight = self.take_mean_weight(model)
            if not micro.summed:  # at once, so that what is done to the gradients before the update is done to these
                held.divide(held.mean_weight)
        held.remember()

    def differentiate(self, model: Any, loss: torch.Tensor, micro: MicroBatch) -> None:
        """Backward of the weighted loss; with `micro.sync`, gradients become their mean over ranks."""
        raise NotImplementedError

    def take_mean_weight(self, model: Any) -> float | torch.Tensor:
        """The mean over ranks of the weights of the group whose gradients were just exchanged."""
        raise NotImplementedError

    def apply(self, model: Any, optimizer: Any, update: Update) -> float | torch.Tensor:
        rescale, clip_norm, lr = update
        held, scaler = self._held[model], self._scalers.get(model)
        mean_weight: float | torch.Tensor = 1.0
        with self._giving_up(model):
            if held.check_present() and (scaler is not None or rescale not in (None, 1.0)):
                left = "the scale of an fp16 loss" if scaler is not None else "what the loss was weighted by"
                raise StateError(
                    "the gradients were changed between backward and step, as by a clipping of the loop's own, when "
                    f"they were still multiplied by {left}: leave it out, and clip by "
                    "strategy.step(optimizer, clip_norm=…), flush(…, clip_norm=…) or train_step(…, clip_norm=…)"
                )
        if rescale is None:  # backward has divided them
            mean_weight = held.mean_weight
        else:
            self.take_mean_weight(model)
        if scaler is not None:
            scaler.unscale_(optimizer)
        if rescale not in (None, 1.0) or clip_norm is not None:
            parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            if rescale not in (None, 1.0):
                torch._foreach_mul_([p.grad for p in parameters], rescale)
            if clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
        if lr is not None:
            for group in optimizer.param_groups:
                group["lr"] = lr
        with self._guard.stepping(optimizer):
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)  # leaves an overflowed update out, on all ranks alike
                scaler.update()
        held.clear()  # all of them: the optimizer may train a part of the model
        return mean_weight

    @contextmanager
    def _giving_up(self, model: Any) -> Iterator[None]:
        """A group whose update is refused is lost, and the next one begins without its gradients."""
        try:
            yield
        except StateError:
            self.clear_gradients(model)
            raise

    def train_step(self, model: Any, optimizer: Any, loss_fn: Callable[..., Any], compile: bool) -> Callable[..., Any]:
        if compile:
            self.unwrap(model).compile()
        run, held = super().train_step(model, optimizer, loss_fn, compile), self._held[model]

        def step(batch: Sequence[Any], micro: MicroBatch, update: Update | None) -> Any:
            held.unwatched = update is not None  # nobody comes between backward and the update: it need not cost
            try:
                return run(batch, micro, update)
            finally:
                held.unwatched = False

        return step

    # -- the framework's own data loaders

    def open_loader(self, loader: object) -> NativeLoader | None:
        return loading.open_loader(loader, self.world)

    def read_batches(self, source: NativeLoader, batches: Any) -> AbstractContextManager[Iterator[Any]]:
        return loading.read_batches(source, batches, self._device)

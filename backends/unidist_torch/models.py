"""torch models, optimizers and their steps, whatever carries the gradients: what every backend on torch shares."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import numpy as np
import torch

from unidist import SGD, Adam, AdamW, Backend, Features, OptimizerSpec, Update, World
from unidist.data.source import OwnLoader
from unidist.errors import UsageError
from unidist_torch import batchnorm, loading
from unidist_torch.devices import pick_device

# What unidist's checkpoints call an optimizer's tensors, so that another framework can read them.
PORTABLE = {"momentum_buffer": "velocity", "exp_avg": "first_moment", "exp_avg_sq": "second_moment"}


class TorchModels(Backend):
    """All of the contract but meeting, collectives, `prepare`, `forward`, `average` and what wraps a model."""

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

    def ready(
        self, model: Any, optimizer: Any, features: Features, all_reduce: Callable[[Any], Any] | None = None
    ) -> tuple[Any, Any]:
        """The model on the device and the optimizer as torch has them, checked. `all_reduce` is a differentiable sum
        for batch normalisation over ranks; None: torch.distributed's."""
        if not isinstance(model, torch.nn.Module):
            raise UsageError(f"this backend prepares a torch.nn.Module, not a {type(model).__name__}")
        if features.sync_batchnorm:
            if isinstance(optimizer, torch.optim.Optimizer):
                _check_optimizer(optimizer, model)
            model = batchnorm.convert(model, self._device.type == "cuda", lambda: self.padding_only, all_reduce)
        model.to(self._device)
        if isinstance(optimizer, OptimizerSpec):
            trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
            if not trainable:
                raise UsageError("the model has no parameter that requires a gradient: nothing to optimize")
            optimizer = _native_optimizer(optimizer, trainable)
            self._from_spec.add(optimizer)
        elif optimizer is not None:
            _check_optimizer(optimizer, model)
        return model, optimizer

    def set_precision(self, model: Any, features: Features) -> None:
        if features.precision is not None:
            self._precision[model] = {"bf16": torch.bfloat16, "fp16": torch.float16}[features.precision]
            if features.precision == "fp16":  # its small gradients would vanish
                self._scalers[model] = torch.amp.GradScaler(self._device.type)

    def unwrap(self, model: Any) -> Any:
        return model

    def state(self, model: Any) -> Mapping[str, torch.Tensor]:
        return {k: v for k, v in self.unwrap(model).state_dict().items() if isinstance(v, torch.Tensor)}

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
        tensors: dict[str, torch.Tensor] = {}
        values: dict[str, Any] = {}
        for name, parameter in self.unwrap(model).named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{name}/{PORTABLE.get(key, key)}"] = value
                elif value is not None:
                    values.setdefault("state", {})[f"{name}/{key}"] = value
        values["kind"] = type(optimizer).__name__
        values["groups"] = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        if model in self._scalers:
            values["scaler"] = self._scalers[model].state_dict()
        return tensors, values

    def load_optimizer_state(
        self, model: Any, optimizer: Any, arrays: Mapping[str, np.ndarray], values: Mapping[str, Any]
    ) -> None:
        native = {portable: key for key, portable in PORTABLE.items()}
        parameters = dict(self.unwrap(model).named_parameters())
        optimizer.state.clear()
        for name, array in arrays.items():
            parameter, _, key = name.rpartition("/")
            # A step count stays on the host, where torch's optimizers look for it.
            device = self._device if array.shape == tuple(parameters[parameter].shape) and array.ndim else "cpu"
            tensor = torch.from_numpy(np.array(array)).to(device)
            if key in native:
                tensor = tensor.to(parameters[parameter].dtype)
            optimizer.state[parameters[parameter]][native.get(key, key)] = tensor
        for name, value in values.get("state", {}).items():
            parameter, _, key = name.rpartition("/")
            optimizer.state[parameters[parameter]][key] = value
        if optimizer not in self._from_spec:  # torch's habit: a native optimizer's settings come from the checkpoint
            for group, saved in zip(optimizer.param_groups, values["groups"], strict=True):
                group.update({k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()})
        if model in self._scalers and "scaler" in values:
            self._scalers[model].load_state_dict(values["scaler"])

    def rng_state(self) -> dict[str, np.ndarray]:
        states = {"torch": torch.get_rng_state().numpy()}
        if self._device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self._device).numpy()
        return states

    def load_rng_state(self, arrays: Mapping[str, np.ndarray]) -> None:
        if "torch" in arrays:
            torch.set_rng_state(torch.from_numpy(np.array(arrays["torch"])))
        if "cuda" in arrays and self._device.type == "cuda":
            torch.cuda.set_rng_state(torch.from_numpy(np.array(arrays["cuda"])), self._device)

    @contextmanager
    def evaluate(self, model: Any) -> Iterator[None]:
        bare = self.unwrap(model)
        modes = [(module, module.training) for module in bare.modules()]
        for buffer in bare.buffers():  # running statistics differ between ranks; evaluation must not
            buffer.copy_(self.broadcast(buffer, 0))
        bare.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module, training in modes:  # one by one: the user may keep some layers in evaluation mode
                module.training = training

    def clear_gradients(self, model: Any) -> None:
        for parameter in model.parameters():
            parameter.grad = None

    def averaged(self, model: Any, what: Literal["gradients", "parameters"]) -> list[list[torch.Tensor]]:
        """The tensors that `average` means, one list for each dtype, in the same order on all ranks.

        A gradient that no rank has stays None: zeros would let momentum and weight decay move its parameter.
        """
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if what == "gradients":
            used = self.all_reduce(torch.tensor([each.grad is not None for each in trained]), "max").tolist()
            trained = [each for each, anywhere in zip(trained, used, strict=True) if anywhere]
            for parameter in trained:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        tensors = [p.grad if what == "gradients" else p.data for p in trained]
        return [[t for t in tensors if t.dtype == dtype] for dtype in dict.fromkeys(t.dtype for t in tensors)]

    # -- a training step

    def backward(self, model: Any, loss: torch.Tensor, weight: float) -> None:
        if weight != 1.0:
            loss = loss * weight
        if model in self._scalers:
            loss = self._scalers[model].scale(loss)
        loss.backward()

    def apply(self, model: Any, optimizer: Any, update: Update) -> None:
        rescale, clip_norm, lr = update
        scaler = self._scalers.get(model)
        if scaler is not None:
            scaler.unscale_(optimizer)
        if rescale != 1.0 or clip_norm is not None:
            held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            if rescale != 1.0:
                torch._foreach_mul_([p.grad for p in held], rescale)
            if clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(held, clip_norm)
        if lr is not None:
            for group in optimizer.param_groups:
                group["lr"] = lr
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)  # leaves an overflowed update out, on all ranks alike: their gradients are the same
            scaler.update()
        optimizer.zero_grad()

    def train_step(self, model: Any, optimizer: Any, loss_fn: Callable[..., Any], compile: bool) -> Callable[..., Any]:
        if compile:
            self.unwrap(model).compile()
        return super().train_step(model, optimizer, loss_fn, compile)

    # -- the framework's own data loaders

    def open_loader(self, loader: object) -> OwnLoader | None:
        return loading.open_loader(loader, self.world)

    def read_batches(self, source: OwnLoader, batches: Any) -> AbstractContextManager[Iterator[Any]]:
        return loading.read_batches(source, batches, self._device)


def _native_optimizer(spec: OptimizerSpec, parameters: list[Any]) -> torch.optim.Optimizer:
    common = {"lr": spec.rate(0), "weight_decay": spec.weight_decay}
    match spec:
        case SGD():
            return torch.optim.SGD(parameters, momentum=spec.momentum, nesterov=spec.nesterov, **common)
        case AdamW():  # before Adam, of which it is a kind
            return torch.optim.AdamW(parameters, betas=spec.betas, eps=spec.eps, **common)
        case Adam():
            return torch.optim.Adam(parameters, betas=spec.betas, eps=spec.eps, **common)
    raise UsageError(
        f"the torch backend does not know the optimizer spec {type(spec).__name__}: pass a torch.optim one"
    )


def _check_optimizer(optimizer: Any, model: Any) -> None:
    """An optimizer made for another copy of the model would move nothing, without an error."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"the optimizer is a {type(optimizer).__name__}: pass unidist.SGD/Adam/AdamW or a torch.optim one"
        )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    strangers = sum(each not in names for each in held)
    if strangers:
        raise UsageError(
            f"{strangers} of the optimizer's {len(held)} parameters are not the model's: make it from this model's "
            "parameters(), after any copy or conversion of the model"
        )

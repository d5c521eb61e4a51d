"""PyTorch DistributedDataParallel behind the contract of `unidist.backend`."""

from __future__ import annotations

import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from unidist import SGD, Adam, AdamW, Backend, Features, OptimizerSpec, Update, World
from unidist.backend import Reduction
from unidist.data.source import OwnLoader
from unidist.errors import CommunicationError, PeerFailed, StateError, UnsupportedOperation, UsageError
from unidist_torch import TorchOptions, batchnorm, compression, loading, plugin
from unidist_torch.devices import pick_device, pick_transport

# What unidist's checkpoints call an optimizer's tensors, so that another framework can read them.
PORTABLE = {"momentum_buffer": "velocity", "exp_avg": "first_moment", "exp_avg_sq": "second_moment"}
REDUCE = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


class TorchBackend(Backend):
    framework = "torch"
    capabilities = plugin.capabilities

    def __init__(self, world: World, options: TorchOptions, device: str | None, timeout: float) -> None:
        self.world, self.options = world, options
        self.device = pick_device(device, torch.cuda.device_count(), world, os.environ.get("CUDA_VISIBLE_DEVICES"))
        self._device = torch.device(self.device)
        available = {name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available")()}
        transport, why = pick_transport(options.transport, self.device, available)
        self.transport = f"{transport} ({why})"
        self.version = torch.__version__
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._from_spec: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers whose settings the user's code holds
        self._precision: weakref.WeakKeyDictionary[Any, torch.dtype] = weakref.WeakKeyDictionary()
        self._scalers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # model -> GradScaler
        self._meet(transport, timeout)

    def _meet(self, transport: str, timeout: float) -> None:
        if dist.is_initialized():
            raise StateError(
                "torch.distributed is initialised already: leave init_process_group to unidist, and close the "
                "first Strategy before opening another"
            )
        world = self.world
        group = {"backend": transport, "timeout": timedelta(seconds=self.options.collective_timeout)}
        if transport == "mpi":
            dist.init_process_group(**group)  # the MPI library knows who is there
            return
        if world.world_size == 1:
            dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, **group)
            return
        if world.master_addr is None or world.master_port is None:
            raise UsageError(
                f"{world.source} does not say where rank 0 is: set MASTER_ADDR and MASTER_PORT for every process, "
                "or start with `unidist run`"
            )
        if world.master_addr in ("127.0.0.1", "localhost", "::1") and "lo" in dict(
            map(reversed, socket.if_nameindex())
        ):
            # Left alone, gloo listens on whatever the hostname resolves to, which need not be reachable, nor local.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        # Under torchrun its agent hosts the store and no rank listens. In a process started otherwise, an inherited
        # flag would make every rank wait for an agent that is not there.
        agent = world.source == "torchrun" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        try:
            store = dist.TCPStore(
                world.master_addr,
                world.master_port,
                world.world_size,
                is_master=world.rank == 0 and not agent,
                timeout=timedelta(seconds=timeout),
                multi_tenant=not agent,
            )
            dist.init_process_group(store=store, rank=world.rank, world_size=world.world_size, **group)
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {world.rank} of {world.world_size} could not meet the others at "
                f"{world.master_addr}:{world.master_port} within {timeout:g} s. Are all ranks started, is the address "
                f"that of rank 0's host, and is the port free there? torch says: {str(error).splitlines()[0]}"
            ) from error

    def close(self, failed: bool) -> None:
        if not failed:
            self.barrier()  # rank 0 hosts the store: it must not leave first
            dist.destroy_process_group()
            return
        # Left undestroyed, the group's threads make the process abort at its end and hide its own error; but destroying
        # it may wait for an operation under way, and so for peers.
        leaving = threading.Thread(target=dist.destroy_process_group, daemon=True)
        leaving.start()
        leaving.join(timeout=2.0)

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

    # -- collectives

    def all_reduce(self, tensor: torch.Tensor, op: Reduction) -> torch.Tensor:
        result = self._own_copy(tensor)
        if tensor.dtype == torch.bool:  # no transport reduces bool
            result = result.to(torch.int64)
        with self._translated(f"all_reduce {op}", tensor):
            dist.all_reduce(result, REDUCE[op])
        return result.bool() if tensor.dtype == torch.bool and op != "sum" else result

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        mine = self._own_copy(tensor)
        results = [torch.empty_like(mine) for _ in range(self.world.world_size)]
        with self._translated("all_gather", tensor):
            dist.all_gather(results, mine)
        return results

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        result = self._own_copy(tensor)
        with self._translated("broadcast", tensor):
            dist.broadcast(result, source)
        return result

    def barrier(self) -> None:
        with self._translated("barrier"):
            dist.barrier()

    def _own_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(self._device).clone(memory_format=torch.contiguous_format)

    @contextmanager
    def _translated(self, what: str, tensor: torch.Tensor | None = None) -> Iterator[None]:
        """torch reports both a wrong dtype and a dead peer as RuntimeError; only the second is somebody else's."""
        try:
            yield
        except RuntimeError as error:
            text = str(error).splitlines()[0]
            if "scalar type" in text or "not supported" in text.lower() or "unsupported" in text.lower():
                dtype = tensor.dtype if tensor is not None else "this"
                raise UnsupportedOperation(
                    f"{self.transport} cannot {what} {dtype}: convert to float32 first"
                ) from error
            raise PeerFailed(f"rank {self.world.rank} lost another rank during {what}: {text}") from error

    # -- models

    def prepare(self, model: Any, optimizer: Any, features: Features) -> tuple[Any, Any]:
        if isinstance(model, DistributedDataParallel):
            raise UsageError(
                "the model is wrapped in DistributedDataParallel already: pass the bare module, prepare wraps it"
            )
        if not isinstance(model, torch.nn.Module):
            raise UsageError(f"the torch backend prepares a torch.nn.Module, not a {type(model).__name__}")
        if features.sync_batchnorm:
            if isinstance(optimizer, torch.optim.Optimizer):
                _check_optimizer(optimizer, model)
            model = batchnorm.convert(model, self._device.type == "cuda")
        model.to(self._device)
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if isinstance(optimizer, OptimizerSpec):
            if not trainable:
                raise UsageError("the model has no parameter that requires a gradient: nothing to optimize")
            optimizer = _native_optimizer(optimizer, trainable)
            self._from_spec.add(optimizer)
        elif optimizer is not None:
            _check_optimizer(optimizer, model)
        if not trainable:  # DDP refuses such a model; all it would do is the broadcast
            self.load_state(model, {k: self.to_numpy(self.broadcast(v, 0)) for k, v in self.state(model).items()})
            return model, optimizer
        wrapped = DistributedDataParallel(
            model,
            device_ids=[self._device.index] if self._device.type == "cuda" else None,
            bucket_cap_mb=self.options.bucket_cap_mb,
            find_unused_parameters=self.options.find_unused_parameters,
            static_graph=self.options.static_graph,
            gradient_as_bucket_view=True,
            # True is DDP's default; to name it would bring its warning about the name.
            **({} if self.options.broadcast_buffers else {"broadcast_buffers": False}),
        )
        if features.compression is not None:
            compression.register(wrapped, features.compression)
        if features.precision is not None:
            self._precision[wrapped] = {"bf16": torch.bfloat16, "fp16": torch.float16}[features.precision]
            if features.precision == "fp16":  # its small gradients would vanish
                self._scalers[wrapped] = torch.amp.GradScaler(self._device.type)
        return wrapped, optimizer

    def unwrap(self, model: Any) -> Any:
        return model.module if isinstance(model, DistributedDataParallel) else model

    def state(self, model: Any) -> Mapping[str, torch.Tensor]:
        return {k: v for k, v in self.unwrap(model).state_dict().items() if isinstance(v, torch.Tensor)}

    def load_state(self, model: Any, arrays: Mapping[str, np.ndarray]) -> None:
        state = self.state(model)
        with torch.no_grad():
            for name, array in arrays.items():
                state[name].copy_(torch.from_numpy(np.array(array)))

    def optimizer_state(self, model: Any, optimizer: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        tensors: dict[str, torch.Tensor] = {}
        values: dict[str, Any] = {}
        for name, parameter in self.unwrap(model).named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{name}/{PORTABLE.get(key, key)}"] = value
                elif value is not None:
                    values.setdefault("state", {})[f"{name}/{key}"] = value
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
        for (
            buffer
        ) in bare.buffers():  # DDP evens them out at the *next* training step; evaluation must not depend on the rank
            buffer.copy_(self.broadcast(buffer, 0))
        if bare is not model:
            model.forward = bare.__call__  # not DDP's: it communicates
        bare.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            if bare is not model:
                del model.forward
            for module, training in modes:  # one by one: the user may keep some layers in evaluation mode
                module.training = training

    # -- a training step

    def forward(self, model: Any, sync: bool) -> AbstractContextManager[None]:
        if model in self._precision:
            return self._mixed(model, sync)
        return nullcontext() if sync else model.no_sync()

    @contextmanager
    def _mixed(self, model: Any, sync: bool) -> Iterator[None]:
        with nullcontext() if sync else model.no_sync(), torch.autocast(self._device.type, self._precision[model]):
            yield

    def backward(self, model: Any, loss: torch.Tensor, weight: float) -> None:
        if weight != 1.0:
            loss = loss * weight
        if model in self._scalers:
            loss = self._scalers[model].scale(loss)
        loss.backward()  # DDP averages over ranks

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

    def average(self, model: Any, what: Literal["gradients", "parameters"]) -> None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if what == "gradients":
            for parameter in trained:
                if parameter.grad is None:  # on another rank it may be there
                    parameter.grad = torch.zeros_like(parameter)
        tensors = [p.grad if what == "gradients" else p.data for p in trained]
        for dtype in {tensor.dtype for tensor in tensors}:
            alike = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.reshape(-1) for tensor in alike])
            with self._translated(f"average {what}", flat):
                dist.all_reduce(flat)
            parts = flat.div_(self.world.world_size).split([tensor.numel() for tensor in alike])
            for tensor, part in zip(alike, parts, strict=True):
                tensor.copy_(part.view_as(tensor))

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

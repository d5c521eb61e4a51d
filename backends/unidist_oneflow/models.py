"""Models on OneFlow and their steps, in its mirrored view; `consistent` adds the other one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import oneflow as flow

from unidist.plugin import (
    CheckpointError,
    Features,
    MicroBatch,
    NativeLoader,
    OptimizerSpec,
    Pace,
    UnsupportedOperation,
    Update,
    UsageError,
    check_tied,
    expect,
)
from unidist_oneflow import OneFlowOptions, batchnorm, capabilities, consistent, loading, optimizers
from unidist_oneflow.cluster import Cluster
from unidist_oneflow.gradients import FlatGradients
from unidist_oneflow.settled import Settled
from unidist_oneflow.tensors import OneFlowTensors
from unidist_oneflow.updates import GraphUpdate
from unidist_oneflow.variables import Faces


@dataclass
class Prepared:
    """What belongs to a prepared model, beside the model."""

    named: dict[str, Any]  # its parameters as local tensors
    gradients: FlatGradients | None
    faces: Faces | None  # in the consistent view
    update: GraphUpdate | None  # likewise
    settled: Settled
    lengths: list[int]  # of the groups of the optimizer


class OneFlowBackend(OneFlowTensors):
    def __init__(self, cluster: Cluster, options: OneFlowOptions, device: str) -> None:
        super().__init__(cluster.world, device)
        self._cluster, self.options = cluster, options
        self.transport = f"OneFlow {options.view} view ({'TCP' if device == 'cpu' else 'NCCL'})"
        self.capabilities = capabilities(options)
        self._from_spec: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers whose settings the user's code holds
        self._prepared: weakref.WeakKeyDictionary[Any, Prepared] = weakref.WeakKeyDictionary()
        self._micro = MicroBatch()  # of the step under way
        self._stepping: Any = None  # the optimizer whose step is ours
        self.pace = Pace(lambda losses: losses[-1].numpy())
        self._closed = False

    def close(self, failed: bool) -> None:
        self._closed = True
        if not failed:
            self.barrier()
        self._cluster.leave(failed)

    # -- models

    def check_prepare(self, model: Any, optimizer: Any) -> None:
        _check_model(model)
        if getattr(model, "_is_ddp_module", False):
            raise UsageError("the model went through OneFlow's DistributedDataParallel already: pass it as it was")
        if model in self._prepared:
            raise UsageError("this model is prepared already: use what the first prepare() returned")
        if any(tensor.is_global for tensor in model.state_dict().values()):
            raise UsageError("the model is made of global tensors already: pass it as it was before to_global()")
        self._check_dtypes(model)
        if optimizer is not None and not any(parameter.requires_grad for parameter in model.parameters()):
            raise UsageError("the model has no parameter that requires a gradient: nothing to optimize")
        if optimizer is not None and not isinstance(optimizer, OptimizerSpec):
            optimizers.check(optimizer, model)

    def check_optimizer(self, model: Any, optimizer: Any) -> None:
        """The parameters are only looked at where their number has changed."""
        prepared, lengths = self._prepared[model], optimizers.lengths(optimizer)
        if lengths != prepared.lengths:
            optimizers.check_groups(optimizer, prepared.named.values())
            prepared.lengths = lengths

    def prepare(self, model: Any, optimizer: Any, features: Features) -> tuple[Any, Any]:
        if features.sync_batchnorm and self.world.world_size > 1:
            model = batchnorm.convert(model, lambda: self._micro.weight == 0)
        batchnorm.refuse_single_rows(model, self.world)
        for module in model.modules():
            if isinstance(module, flow.nn.Dropout):
                module.generator = flow.default_generator  # each has one of its own, which no checkpoint would hold
        model.to(self.device)  # also on the CPU: PReLU's weight is made on cpu:0, whatever the rank
        local_parameters = dict(model.named_parameters())
        named = {name: parameter for name, parameter in local_parameters.items() if parameter.requires_grad}
        if isinstance(optimizer, OptimizerSpec):
            optimizer = optimizers.native(optimizer, list(named.values()))
            self._from_spec.add(optimizer)
        if optimizer is not None:
            optimizers.guard(optimizer, lambda which: self._closed or which is self._stepping)
        with flow.no_grad():
            for tensor in self.state(model).values():
                tensor.copy_(self.broadcast(tensor, 0))
        faces = gradients = update = None
        if self.options.view == "consistent":
            faces = Faces(model, self._placement)
            if optimizer is not None:
                update = GraphUpdate(optimizer, faces)
        if optimizer is not None:
            gradients = FlatGradients(named, self.device, self.world.world_size, features)
        lengths = [] if optimizer is None else optimizers.lengths(optimizer)
        settled = Settled(dict(model.named_parameters()), local_parameters, gradients)
        self._prepared[model] = Prepared(local_parameters, gradients, faces, update, settled, lengths)
        return model, optimizer

    def _check_dtypes(self, model: Any) -> None:
        """Before anything is done with the model: where OneFlow cannot exchange a tensor it aborts the process."""
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.requires_grad and tensor.dtype not in (flow.float32, flow.float64):
                raise UnsupportedOperation(
                    f"parameter {name} is {tensor.dtype}, which OneFlow cannot all-reduce: train in float32 or float64"
                )
            if self.options.view == "consistent" and tensor.dtype in (flow.float16, flow.bfloat16):
                raise UnsupportedOperation(
                    f"{name} is {tensor.dtype}, of which OneFlow cannot make a global tensor: use float32, or "
                    "view='mirrored'"
                )

    @contextmanager
    def all_local(self) -> Iterator[None]:
        """Inside, every prepared model is one of local tensors: a loss may depend on several of them."""
        with ExitStack() as stack:
            for prepared in self._prepared.values():
                if prepared.faces:
                    stack.enter_context(prepared.faces.local())
            yield

    def unwrap(self, model: Any) -> Any:
        return model

    def state(self, model: Any) -> Mapping[str, Any]:
        _check_model(model)
        return {name: self._local(tensor.detach()) for name, tensor in model.state_dict().items()}

    def parameters(self, model: Any) -> Mapping[str, Any]:
        named = self._prepared[model].named
        return {name: parameter.detach() for name, parameter in named.items() if parameter.requires_grad}

    def check_state(self, model: Any, arrays: Mapping[str, np.ndarray], filled: Collection[str]) -> None:
        check_tied(arrays, model.state_dict(keep_vars=True))

    def load_state(self, model: Any, arrays: Mapping[str, np.ndarray]) -> None:
        state = self.state(model)
        with flow.no_grad():
            for name, array in arrays.items():
                given = np.array(array)
                tensor = self.from_numpy(given.astype(np.int64) if given.dtype.kind in "iu" else given)
                state[name].copy_(tensor.to(state[name].dtype))

    @contextmanager
    def evaluate(self, model: Any) -> Iterator[None]:
        modes = [(module, module.training) for module in model.modules()]
        with self.all_local(), flow.no_grad():
            for buffer in model.buffers():  # ranks keep their own while training; evaluation must not depend on that
                buffer.copy_(self.broadcast(buffer, 0))
            model.eval()
            try:
                yield
            finally:
                for module, training in modes:  # one by one: the user may keep some layers in evaluation mode
                    module.training = training

    # -- a training step

    def forward(self, model: Any, micro: MicroBatch) -> AbstractContextManager[None]:
        self.pace.keep()
        self._micro = micro
        self._prepared[model].settled.check()
        return nullcontext()

    def backward(self, model: Any, loss: Any, micro: MicroBatch) -> None:
        gradients = self._prepared[model].gradients
        assert gradients is not None
        gradients.begin()
        weight = micro.weight / gradients.divisor
        # 0 times a loss that is not a number would not be 0. The other ranks may wait inside backward all the same.
        with nullcontext() if weight else gradients.kept():
            (loss if weight == 1.0 else loss * weight).backward()
        gradients.added(micro)
        self.pace.told(loss.detach())

    def apply(self, model: Any, optimizer: Any, update: Update) -> float | Any:
        prepared, rescale = self._prepared[model], update.rescale
        assert prepared.gradients is not None
        prepared.settled.check()
        mean_weight = prepared.gradients.take_mean_weight()
        if rescale is None:
            rescale = 1.0 / mean_weight
        else:
            mean_weight = 1.0
        prepared.gradients.scale(rescale)
        if update.clip_norm is not None:
            prepared.gradients.clip(update.clip_norm)
        optimizers.set_rate(optimizer, update.lr)
        self._stepping = optimizer
        try:
            optimizer.step()
        finally:
            self._stepping = None
        prepared.gradients.clear_later()
        return mean_weight

    def train_step(
        self, model: Any, optimizer: Any, loss_fn: Callable[..., Any], compile: bool
    ) -> Callable[[Sequence[Any], MicroBatch, Update | None], tuple[Any, Any]]:
        if self.options.view == "mirrored":
            return super().train_step(model, optimizer, loss_fn, compile)
        prepared, graph = self._prepared[model], compile or self.options.graph
        return consistent.GlobalStep(self, model, optimizer, loss_fn, prepared, graph)

    def clear_gradients(self, model: Any) -> None:
        gradients = self._prepared[model].gradients
        if gradients is not None:
            gradients.clear()

    def keep_gradients(self, model: Any, other: Any) -> AbstractContextManager[None]:
        gradients = self._prepared[model].gradients  # no two models share parameters: `prepare` refuses that
        return nullcontext() if gradients is None else gradients.kept()

    def average(self, model: Any, what: Literal["gradients", "parameters"]) -> None:
        prepared = self._prepared.get(model)
        if what == "gradients" and prepared is not None and prepared.gradients is not None:
            prepared.gradients.average()
            return
        if what == "gradients" or prepared is None:
            raise UsageError(f"average_{what}(model): this model was not returned by prepare(model, optimizer)")
        with flow.no_grad():
            for parameter in prepared.named.values():
                if parameter.requires_grad:
                    parameter.copy_(self._sum(parameter.detach().clone()) / self.world.world_size)

    # -- what a checkpoint holds

    def settings(self, optimizer: Any) -> dict[str, object]:
        groups = optimizer.param_groups if isinstance(optimizer, flow.optim.Optimizer) else []
        plain = (bool, int, float, tuple)
        return {
            f"{k} {i}": v for i, group in enumerate(groups) for k, v in group.options.items() if isinstance(v, plain)
        }

    def optimizer_state(self, model: Any, optimizer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        return optimizers.state(self._prepared[model].named, optimizer)

    def load_optimizer_state(
        self, model: Any, optimizer: Any, arrays: Mapping[str, np.ndarray], values: Mapping[str, Any]
    ) -> Callable[[], None]:
        native = optimizer not in self._from_spec
        return optimizers.checked_state(
            self._prepared[model].named, optimizer, arrays, values, self.from_numpy, with_settings=native
        )

    def rng_state(self) -> dict[str, np.ndarray]:
        # OneFlow leaves out how far a generator has come within its block of numbers; a new one is at the beginning. So
        # the generator draws its own successor: this run and one that is resumed go on with that, and draw the same.
        flow.manual_seed(int(flow.randint(0, 2**31 - 1, (1,)).numpy()[0]))
        return {"oneflow": self.to_numpy(flow.get_rng_state())}

    def load_rng_state(self, arrays: Mapping[str, np.ndarray]) -> Callable[[], None]:
        what, shape = "the generator state 'oneflow'", tuple(flow.get_rng_state().shape)
        state = expect.array(what, arrays.get("oneflow"), np.uint8, shape).copy()
        words = state[: 624 * 8].view("<u8")  # 32 bits each, in 8 bytes. OneFlow looks at the length alone
        if not 0 < words.max() < 2**32:
            raise CheckpointError(f"{what} is damaged")

        def put() -> None:
            flow._oneflow_internal.eager.Sync()
            flow.set_rng_state(flow.from_numpy(state))

        return put

    # -- OneFlow's own data loaders

    def open_loader(self, loader: object) -> NativeLoader | None:
        return loading.open_loader(loader, self.world)

    def read_batches(
        self, source: NativeLoader, batches: Sequence[Sequence[int]] | None
    ) -> AbstractContextManager[Iterator[Any]]:
        return loading.read_batches(source, batches, self.device)


def _check_model(model: object) -> None:
    if not isinstance(model, flow.nn.Module):
        raise UsageError(f"the oneflow backend takes a oneflow.nn.Module, not an object of type {type(model).__name__}")

"""OneFlow behind the contract of `unidist.backend`, in its mirrored view; `consistent` adds the other one."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from unidist import Backend, Features, OptimizerSpec, Update, World
from unidist.backend import Reduction
from unidist.errors import StateError, UnsupportedOperation, UsageError
from unidist_oneflow import OneFlowOptions, plugin
from unidist_oneflow.cluster import Cluster
from unidist_oneflow.devices import pick_device, visible_gpus
from unidist_oneflow.machines import place

if TYPE_CHECKING:
    from unidist.data.source import OwnLoader
    from unidist_oneflow.gradients import FlatGradients
    from unidist_oneflow.updates import GraphUpdate
    from unidist_oneflow.variables import Faces

# Bound when a Strategy starts: oneflow fixes its cluster while it is imported.
flow: Any = None
optimizers: Any = None
loading: Any = None


@dataclass
class Prepared:
    """What belongs to a prepared model, beside the model."""

    named: dict[str, Any]  # its parameters as local tensors
    gradients: FlatGradients | None
    faces: Faces | None  # in the consistent view
    update: GraphUpdate | None  # likewise
    exchanged: bool  # gradients are summed over the ranks before they are applied
    shown: list[tuple[str, Any, bool]]  # the parameters that the user sees: name, tensor, requires_grad

    def check_requires_grad(self) -> None:
        for name, tensor, trained in self.shown:
            if tensor.requires_grad != trained:
                raise StateError(
                    f"parameter {name} was {'frozen' if trained else 'unfrozen'} after prepare(), which has settled "
                    "what is trained and exchanged: set requires_grad before it. In the middle of a training, save, "
                    "prepare a new model and load"
                )


class OneFlowBackend(Backend):
    framework = "oneflow"

    def __init__(self, world: World, options: OneFlowOptions, device: str | None, timeout: float) -> None:
        global flow, optimizers, loading
        self.world, self.options = place(world, options), options
        self.device = pick_device(device, visible_gpus(), self.world)
        self._cluster = Cluster(self.world, options, on_gpu=self.device != "cpu", timeout=timeout)
        self.world, flow = self._cluster.world, self._cluster.flow
        optimizers = importlib.import_module("unidist_oneflow.optimizers")  # needs oneflow, as those below do
        loading = importlib.import_module("unidist_oneflow.loading")
        self.version = flow.__version__
        on_gpu = self.device != "cpu"
        self.transport = f"OneFlow {options.view} view ({'NCCL' if on_gpu else 'TCP'})"
        self.capabilities = plugin.capabilities
        if options.view == "consistent":
            from unidist_oneflow.consistent import DIFFERENT

            self.capabilities = replace(plugin.capabilities, **DIFFERENT)
        self._placement = flow.placement("cuda" if on_gpu else "cpu", ranks=list(range(self.world.world_size)))
        self._from_spec: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers whose settings the user's code holds
        self._prepared: weakref.WeakKeyDictionary[Any, Prepared] = weakref.WeakKeyDictionary()

    def close(self, failed: bool) -> None:
        if not failed:
            self.barrier()
        self._cluster.leave(failed)

    # -- tensors

    def is_tensor(self, value: object) -> bool:
        return isinstance(value, flow.Tensor)

    def to_numpy(self, tensor: Any) -> np.ndarray:
        tensor = self._local(tensor.detach())
        if tensor.dtype == flow.bfloat16:  # numpy has none; float32 holds every value of it
            tensor = tensor.to(flow.float32)
        return np.array(tensor.cpu().numpy())

    def from_numpy(self, array: np.ndarray) -> Any:
        try:
            tensor = flow.from_numpy(np.ascontiguousarray(array) if array.ndim else array)
        except Exception as error:
            raise UnsupportedOperation(
                f"OneFlow has no dtype {array.dtype}: convert to int64, int32, int8, uint8, bool or a float first"
            ) from error
        return tensor if self.device == "cpu" else tensor.to(self.device)

    def _local(self, tensor: Any) -> Any:
        if tensor.is_local:
            return tensor
        if any(sbp != flow.sbp.broadcast for sbp in tensor.sbp):
            raise UsageError(
                f"a global tensor with sbp {tensor.sbp} is no plain value: "
                "tensor.to_global(sbp=flow.sbp.broadcast).to_local() makes it one, on all ranks"
            )
        return tensor.to_local()

    # -- collectives

    def all_reduce(self, tensor: Any, op: Reduction) -> Any:
        mine = self._own_copy(tensor)
        result = flow.int64 if mine.dtype == flow.bool and op == "sum" else mine.dtype  # bools are counted
        if mine.dtype in (flow.float16, flow.bfloat16):  # OneFlow aborts the process
            mine = mine.to(flow.float32)
        elif mine.dtype in (flow.bool, flow.int8, flow.uint8):
            mine = mine.to(flow.int64)
        if op == "sum":
            return self._sum(mine).to(result)
        stacked = self._stacked(mine)
        return (stacked.amin(0) if op == "min" else stacked.amax(0)).to(result)

    def _sum(self, mine: Any) -> Any:
        return mine if self.world.world_size == 1 else flow._C.local_all_reduce(mine, inplace=False)

    def all_gather(self, tensor: Any) -> list[Any]:
        stacked = self._stacked(self._own_copy(tensor))
        return [stacked[rank].clone() for rank in range(self.world.world_size)]

    def broadcast(self, tensor: Any, source: int) -> Any:
        mine = self._own_copy(tensor)
        if self.world.world_size == 1 or 0 in mine.shape:
            return mine
        if mine.dtype in (flow.float16, flow.bfloat16):
            return self._stacked(mine)[source].clone()
        flow._C.comm_broadcast(mine, src_rank=source, inplace=True)
        return mine

    def barrier(self) -> None:
        self._sum(flow.ones(1, device=self.device)).numpy()  # reading it waits for everyone's part

    def _own_copy(self, tensor: Any) -> Any:
        return self._local(tensor.detach()).to(self.device.partition(":")[0]).contiguous().clone()

    def _stacked(self, mine: Any) -> Any:
        """One tensor with a row from each rank."""
        row = mine.reshape(1, *mine.shape)
        if self.world.world_size == 1 or 0 in mine.shape:
            return row.expand(self.world.world_size, *mine.shape)
        split = row.to_global(placement=self._placement, sbp=flow.sbp.split(0), check_meta=False)
        return split.to_global(sbp=flow.sbp.broadcast).to_local()

    # -- models

    def prepare(self, model: Any, optimizer: Any, features: Features) -> tuple[Any, Any]:
        if not isinstance(model, flow.nn.Module):
            raise UsageError(f"the oneflow backend prepares an oneflow.nn.Module, not a {type(model).__name__}")
        if getattr(model, "_is_ddp_module", False):
            raise UsageError("the model went through OneFlow's DistributedDataParallel already: pass it as it was")
        if model in self._prepared:
            raise UsageError("this model is prepared already: use what the first prepare() returned")
        if any(each.is_global for each in model.state_dict().values()):
            raise UsageError("the model is made of global tensors already: pass it as it was before to_global()")
        self._check_dtypes(model)
        if optimizer is not None and not any(each.requires_grad for each in model.parameters()):
            raise UsageError("the model has no parameter that requires a gradient: nothing to optimize")
        if features.sync_batchnorm and self.world.world_size > 1:
            from unidist_oneflow import batchnorm

            model = batchnorm.convert(model, lambda: self.padding_only)
        for module in model.modules():
            if isinstance(module, flow.nn.Dropout):
                module.generator = flow.default_generator  # each has one of its own, which no checkpoint would hold
        if self.device != "cpu":
            model.to(self.device)
        from unidist_oneflow.gradients import FlatGradients

        own = dict(model.named_parameters())
        named = {name: each for name, each in own.items() if each.requires_grad}
        if isinstance(optimizer, OptimizerSpec):
            optimizer = optimizers.native(optimizer, list(named.values()))
            self._from_spec.add(optimizer)
        elif optimizer is not None:
            optimizers.check(optimizer, model)
        with flow.no_grad():
            for tensor in self.state(model).values():
                tensor.copy_(self.broadcast(tensor, 0))
        faces = gradients = update = None
        if self.options.view == "consistent":
            from unidist_oneflow import updates
            from unidist_oneflow.variables import Faces

            faces = Faces(model, self._placement)
            if optimizer is not None:
                update = updates.GraphUpdate(optimizer, faces)
        exchanged = not features.local and self.world.world_size > 1
        if optimizer is not None:
            gradients = FlatGradients(named, self.device)
        shown = [(name, each, each.requires_grad) for name, each in model.named_parameters()]
        self._prepared[model] = Prepared(own, gradients, faces, update, exchanged, shown)
        return model, optimizer

    def _check_dtypes(self, model: Any) -> None:
        """Before anything is done with the model: where OneFlow cannot exchange a tensor it aborts the process."""
        for name, each in (*model.named_parameters(), *model.named_buffers()):
            if each.requires_grad and each.dtype not in (flow.float32, flow.float64):
                raise UnsupportedOperation(
                    f"parameter {name} is {each.dtype}, which OneFlow cannot all-reduce: train in float32 or float64"
                )
            if self.options.view == "consistent" and each.dtype in (flow.float16, flow.bfloat16):
                raise UnsupportedOperation(
                    f"{name} is {each.dtype}, of which OneFlow cannot make a global tensor: use float32, or "
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
        return {name: self._local(tensor.detach()) for name, tensor in model.state_dict().items()}

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

    def forward(self, model: Any, sync: bool) -> AbstractContextManager[None]:
        self._prepared[model].check_requires_grad()
        return nullcontext()

    def backward(self, model: Any, loss: Any, weight: float) -> None:
        if self._prepared[model].exchanged:
            weight /= self.world.world_size  # the sum over ranks, made in `apply`, is then the mean
        (loss if weight == 1.0 else loss * weight).backward()

    def apply(self, model: Any, optimizer: Any, update: Update) -> None:
        self.apply_gradients(model, optimizer, update, summed=not self._prepared[model].exchanged)

    def apply_gradients(self, model: Any, optimizer: Any, update: Update, summed: bool) -> None:
        """`summed`: over the ranks, already."""
        gradients = self._prepared[model].gradients
        assert gradients is not None
        gradients.finish(not summed and self.world.world_size > 1, update.rescale, update.clip_norm)
        optimizers.set_rate(optimizer, update.lr)
        optimizer.step()
        gradients.clear_later() if self._prepared[model].faces else gradients.clear()

    def train_step(
        self, model: Any, optimizer: Any, loss_fn: Callable[..., Any], compile: bool
    ) -> Callable[[Sequence[Any], float, bool, Update | None], Any]:
        if self.options.view == "mirrored":
            return super().train_step(model, optimizer, loss_fn, compile)
        from unidist_oneflow.consistent import GlobalStep

        return GlobalStep(self, model, optimizer, loss_fn, self._prepared[model], compile or self.options.graph)

    def clear_gradients(self, model: Any) -> None:
        gradients = self._prepared[model].gradients
        if gradients is not None:
            gradients.clear()

    def average(self, model: Any, what: Literal["gradients", "parameters"]) -> None:
        prepared = self._prepared.get(model)
        if prepared is None or (what == "gradients" and prepared.gradients is None):
            raise UsageError(f"average_{what}(model): this model was not returned by prepare(model, optimizer)")
        if what == "gradients":
            for buffer in prepared.gradients.buffers:  # type: ignore[union-attr]
                buffer.copy_(self._sum(buffer.clone()) / self.world.world_size)
            return
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
    ) -> None:
        with_settings = optimizer not in self._from_spec
        optimizers.load_state(self._prepared[model].named, optimizer, arrays, values, self.from_numpy, with_settings)

    def rng_state(self) -> dict[str, np.ndarray]:
        # OneFlow leaves out how far a generator has come within its block of numbers; a new one is at the beginning. So
        # the generator draws its own successor: this run and one that is resumed go on with that, and draw the same.
        flow.manual_seed(int(flow.randint(0, 2**31 - 1, (1,)).numpy()[0]))
        return {"oneflow": self.to_numpy(flow.get_rng_state())}

    def load_rng_state(self, arrays: Mapping[str, np.ndarray]) -> None:
        if "oneflow" in arrays:
            flow._oneflow_internal.eager.Sync()
            flow.set_rng_state(flow.from_numpy(np.array(arrays["oneflow"])))

    # -- OneFlow's own data loaders

    def open_loader(self, loader: object) -> OwnLoader | None:
        return loading.open_loader(loader, self.world)

    def read_batches(
        self, source: OwnLoader, batches: Sequence[Sequence[int]] | None
    ) -> AbstractContextManager[Iterator[Any]]:
        return loading.read_batches(source, batches, self.device)

"""OneFlow behind the contract of `unidist.backend`, in its mirrored view; `consistent` adds the other one."""

from __future__ import annotations

import importlib
import os
import socket
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from unidist import Backend, Features, OptimizerSpec, Update, World
from unidist.backend import Reduction
from unidist.errors import StateError, UnsupportedOperation, UsageError, WorldError
from unidist_oneflow import OneFlowOptions, plugin, start
from unidist_oneflow.devices import pick_device, visible_gpus
from unidist_oneflow.leaving import Leaving
from unidist_oneflow.lifeline import Lifeline
from unidist_oneflow.machines import place
from unidist_oneflow.meeting import Meeting
from unidist_oneflow.preflight import check_interface, gather_facts

if TYPE_CHECKING:
    from unidist_oneflow.consistent import Faces
    from unidist_oneflow.gradients import FlatGradients

NO_GRAPH = "in OneFlow a compiled step is an nn.Graph of global tensors: use view='consistent'"

optimizers: Any = None
flow: Any = None  # oneflow itself, from the moment at which the first Strategy of the process has brought it up
_up: World | None = None  # the cluster that it was brought up for: it cannot be another one any more
_in_use = False


@dataclass
class Prepared:
    """What belongs to a prepared model, beside the model."""

    named: dict[str, Any]  # its parameters as local tensors
    gradients: FlatGradients | None
    faces: Faces | None  # in the consistent view
    exchanged: bool  # gradients are summed over the ranks before they are applied


class OneFlowBackend(Backend):
    framework = "oneflow"

    def __init__(self, world: World, options: OneFlowOptions, device: str | None, timeout: float) -> None:
        global flow, optimizers, _up, _in_use
        self.world, self.options = place(world, options), options
        self.device = pick_device(device, visible_gpus(), self.world)
        if _in_use:
            raise StateError("a process has one place in OneFlow's cluster: close the first Strategy before another")
        self._lifeline: Lifeline | None = None
        if flow is None:
            start.check_not_imported()
            self.world = _with_meeting_point(self.world)
            self._lifeline = self._meet(timeout)
            graphs = options.view == "consistent"
            flow = start.bring_up(self.world, graphs, options.verbose, timeout, _log_folder())
            optimizers = importlib.import_module("unidist_oneflow.optimizers")  # needs oneflow, as those below do
            _up = self.world
            self._leaving = Leaving(self._tell)
            self._leaving.install()
        elif _up is not None and (self.world.rank, self.world.world_size) != (_up.rank, _up.world_size):
            raise StateError(
                f"this process is rank {_up.rank} of {_up.world_size} in OneFlow's cluster, and cannot become rank "
                f"{self.world.rank} of {self.world.world_size}: use a new process"
            )
        _in_use = True
        self.version = flow.__version__
        on_gpu = self.device != "cpu"
        self.transport = f"OneFlow {options.view} view ({'NCCL' if on_gpu else 'TCP'})"
        self.capabilities = replace(plugin.capabilities, compile=NO_GRAPH)
        if options.view == "consistent":
            from unidist_oneflow.consistent import CANNOT

            self.capabilities = replace(plugin.capabilities, **CANNOT)
        self._placement = flow.placement("cuda" if on_gpu else "cpu", ranks=list(range(self.world.world_size)))
        self._from_spec: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers whose settings the user's code holds
        self._prepared: weakref.WeakKeyDictionary[Any, Prepared] = weakref.WeakKeyDictionary()

    def _meet(self, timeout: float) -> Lifeline | None:
        world, machine = self.world, self.options.machine
        check_interface(world, machine[world.node_rank] if machine else None, self.device != "cpu")
        meeting = Meeting(world, machine, gather_facts(world, machine, self.options.view), timeout)
        if world.num_nodes == 1 and os.environ.get("UNIDIST_TOKEN"):  # one launcher of ours watches all of them
            for wire in meeting.wires.values():
                wire.close()
            return None
        if world.node_rank > 0 and world.local_rank == 0:
            sys.stderr.write(
                f"unidist: node {world.node_rank} of {world.num_nodes} computes; node 0 ({world.master_addr}) prints "
                f"and saves. OneFlow's logs of this node are in {_log_folder()}\n"
            )
        return Lifeline(world, meeting.wires, meeting.everyone)

    def _tell(self, why: str) -> None:
        if self._lifeline is not None:
            self._lifeline.tell(why)

    def close(self, failed: bool) -> None:
        global _in_use
        _in_use = False
        if failed:
            self._leaving.failed()
            return
        self.barrier()
        if self._lifeline is not None:
            self._lifeline.close()

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
        if op == "sum":
            if mine.dtype == flow.bool:
                mine = mine.to(flow.int64)
            carrier = flow.float32 if mine.dtype in (flow.float16, flow.bfloat16) else mine.dtype  # those two abort
            return self._sum(mine.to(carrier)).to(mine.dtype)
        stacked = self._stacked(mine.to(flow.int64) if mine.dtype in (flow.bool, flow.uint8, flow.int8) else mine)
        return (stacked.amin(0) if op == "min" else stacked.amax(0)).to(mine.dtype)

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
        if self.device != "cpu":
            model.to(self.device)
        from unidist_oneflow.gradients import FlatGradients

        own = dict(model.named_parameters())
        named = {name: each for name, each in own.items() if each.requires_grad}
        if isinstance(optimizer, OptimizerSpec):
            if not named:
                raise UsageError("the model has no parameter that requires a gradient: nothing to optimize")
            optimizer = optimizers.native(optimizer, list(named.values()))
            self._from_spec.add(optimizer)
        elif optimizer is not None:
            optimizers.check(optimizer, model)
        with flow.no_grad():
            for tensor in self.state(model).values():
                tensor.copy_(self.broadcast(tensor, 0))
        faces = gradients = None
        if self.options.view == "consistent":
            from unidist_oneflow.consistent import Faces

            faces = Faces(model, self._placement)
        exchanged = not features.local and self.world.world_size > 1
        if optimizer is not None:
            gradients = FlatGradients(named, self.device)
        self._prepared[model] = Prepared(own, gradients, faces, exchanged)
        return model, optimizer

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
        prepared = self._prepared.get(model)
        with prepared.faces.local() if prepared and prepared.faces else nullcontext(), flow.no_grad():
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
        return nullcontext()

    def backward(self, model: Any, loss: Any, weight: float) -> None:
        if self._prepared[model].exchanged:
            weight /= self.world.world_size  # the sum over ranks, made in `apply`, is then the mean
        (loss if weight == 1.0 else loss * weight).backward()

    def apply(self, model: Any, optimizer: Any, update: Update) -> None:
        prepared = self._prepared[model]
        gradients = prepared.gradients
        assert gradients is not None
        gradients.finish(prepared.exchanged, update.rescale, update.clip_norm)
        if update.lr is not None:
            for group in optimizer.param_groups:
                group["lr"] = update.lr
        optimizer.step()
        gradients.clear()

    def train_step(
        self, model: Any, optimizer: Any, loss_fn: Callable[..., Any], compile: bool
    ) -> Callable[[Sequence[Any], float, bool, Update | None], Any]:
        if self.options.view == "mirrored":
            return super().train_step(model, optimizer, loss_fn, compile)
        from unidist_oneflow.consistent import GlobalStep

        return GlobalStep(self, model, optimizer, loss_fn, self._prepared[model], compile or self.options.graph)

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

    def optimizer_state(self, model: Any, optimizer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        return optimizers.state(self._prepared[model].named, optimizer)

    def load_optimizer_state(
        self, model: Any, optimizer: Any, arrays: Mapping[str, np.ndarray], values: Mapping[str, Any]
    ) -> None:
        with_settings = optimizer not in self._from_spec
        optimizers.load_state(self._prepared[model].named, optimizer, arrays, values, self.from_numpy, with_settings)

    def rng_state(self) -> dict[str, np.ndarray]:
        return {"oneflow": self.to_numpy(flow.get_rng_state())}

    def load_rng_state(self, arrays: Mapping[str, np.ndarray]) -> None:
        if "oneflow" in arrays:
            flow.set_rng_state(flow.from_numpy(np.array(arrays["oneflow"])))


def _with_meeting_point(world: World) -> World:
    if world.world_size == 1:  # alone, but OneFlow wants a port nevertheless
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            return replace(world, master_addr="127.0.0.1", master_port=free.getsockname()[1])
    if world.master_addr is None or world.master_port is None:
        raise WorldError(
            f"{world.source} does not say where rank 0 is: set MASTER_ADDR and MASTER_PORT for every process, give "
            "machine= and ctrl_port=, or start with `unidist run`"
        )
    return world


def _log_folder() -> Path:
    given = os.environ.get("GLOG_log_dir")  # noqa: SIM112  # its real name
    return Path(given or Path(tempfile.gettempdir()) / f"oneflow-logs-{os.getuid()}")

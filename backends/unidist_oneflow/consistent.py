"""The consistent view: the model is made of global tensors, and a training step is compiled to an nn.Graph.

The batch of each rank becomes its part of one global batch (split along the first axis), parameters are whole on
every rank (broadcast), and OneFlow finds out what has to be exchanged. Gradients leave the graph, as sums over the
ranks or, while they are accumulated, as partial sums, and are clipped and applied as in the mirrored view. (An
optimizer inside the graph would fix its rate, its batch size and its accumulation for ever.)
"""

from __future__ import annotations

import gc
import sys
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import oneflow as flow
from oneflow import nn

from unidist.backend import Update
from unidist.data.torch_shaped import map_tensors
from unidist.errors import UnidistError

if TYPE_CHECKING:
    from unidist_oneflow.backend import OneFlowBackend, Prepared

# What this view can do, where that is not what the mirrored one can.
DIFFERENT: dict[str, bool | str] = {
    "compile": True,
    "spelled_out": "in the consistent view local batches and a global model only meet inside a step: use train_step, "
    "or view='mirrored'",
    "local_sgd": "in the consistent view a parameter is one global tensor, the same on every rank: use view='mirrored'",
}
GRAPHS = 4  # compiled for so many shapes of batches; others, such as the last batch of a pass, run eagerly

Tensor = Any


class Faces:
    """A module's parameters and buffers as global tensors, and as the local tensors that share their memory.

    The local ones are the user's own objects: an optimizer that was made from them before goes on moving the model.
    """

    def __init__(self, model: Any, placement: Any) -> None:
        self._entries: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []  # (a module's table, name, local, global)
        known: dict[int, Tensor] = {}  # a tensor that two modules share stays shared
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                for name, own in table.items():
                    if own is None:
                        continue
                    if id(own) not in known:
                        known[id(own)] = _global_twin(own, placement)
                    self._entries.append((table, name, own, known[id(own)]))
        self._inside = 0  # how often `local` was entered and not left
        self._show(3)

    def _show(self, which: int) -> None:
        for entry in self._entries:
            entry[0][entry[1]] = entry[which]

    @contextmanager
    def local(self) -> Iterator[None]:
        """Inside, the module is one of local tensors."""
        self._inside += 1
        self._show(2)
        try:
            yield
        finally:
            self._inside -= 1
            self._show(2 if self._inside else 3)

    def twins(self, own: Sequence[Tensor]) -> list[Tensor]:
        by_id = {id(entry[2]): entry[3] for entry in self._entries}
        return [by_id[id(each)] for each in own]


def _global_twin(own: Tensor, placement: Any) -> Tensor:
    whole = own.detach().to_global(placement=placement, sbp=flow.sbp.broadcast)
    own.data = whole.to_local()
    return nn.Parameter(whole, requires_grad=own.requires_grad) if isinstance(own, nn.Parameter) else whole


class GlobalStep:
    """One training step: `(batch, weight, sync, update) -> loss`, this rank's share of it, as a plain local tensor."""

    def __init__(
        self,
        backend: OneFlowBackend,
        model: Any,
        optimizer: Any,
        loss_fn: Callable[..., Tensor],
        prepared: Prepared,
        compile: bool,
    ) -> None:
        assert prepared.faces is not None
        assert prepared.gradients is not None
        self._backend, self._model, self._optimizer, self._loss_fn = backend, model, optimizer, loss_fn
        self._prepared, self._gradients = prepared, prepared.gradients
        self._placement = backend._placement
        self._parameters = [
            prepared.faces.twins(chosen) for chosen in self._gradients.layout
        ]  # one list for each buffer
        self._graphs: dict[str, Any] = {}
        self._compile = compile
        self._modules = list(model.modules())
        if compile and any(isinstance(each, nn.Dropout) for each in self._modules):
            self._run_eagerly("dropout in an nn.Graph draws the same numbers whatever the seed, and again when resumed")
        self._factors: dict[float, Tensor] = {}
        self._agreed: set[int] = set()  # arguments of which all ranks have said that they have such, too
        self._apart = False  # the ranks' arguments make no global batch, so each computes by itself
        self._counters = [each for each in self._modules if getattr(each, "num_batches_tracked", None) is not None]

    def __call__(self, batch: Sequence[Any], weight: float, sync: bool, update: Update | None) -> Tensor:
        self._prepared.check_requires_grad()
        if self._backend.uneven or not self._is_global(batch):
            loss, summed = self._locally(batch, weight), False
        else:
            # Where nothing was accumulated before, the sum over the ranks is a part of the graph too.
            summed = update is not None and not self._gradients.waiting
            loss, *flat = self._run(batch, weight, flow.sbp.broadcast if summed else flow.sbp.partial_sum)
            self._gradients.add(flat)
        if update is not None:
            self._backend.apply_gradients(self._model, self._optimizer, update, summed)
        return loss

    def _is_global(self, batch: Sequence[Any]) -> bool:
        """Whether the ranks' arguments are parts of global tensors. The ranks compare what is new to them, and stay
        apart once they differ: which of them has something new next time, the others could not know. (To compare at
        every step took half as long as a small step, on a busy machine.)"""
        own = zlib.crc32(_shape_of(batch).encode())
        if not self._apart and own not in self._agreed:
            self._agreed.add(own)
            everyone = self._backend.all_gather(self._backend.from_numpy(np.array([own])))
            self._apart = len({int(each.numpy()[0]) for each in everyone}) > 1
            if self._apart:
                self._run_eagerly("the ranks' batches differ in their shapes or plain values")
            elif not all(each.ndim for each in _tensors(batch)):
                self._apart = True
                self._run_eagerly("a tensor without axes cannot be a part of a global one")
        return not self._apart

    def _locally(self, batch: Sequence[Any], weight: float) -> Tensor:
        """Parts that differ in size, or are empty, make no global tensor: each rank computes its own, by weight."""
        self._gradients.clear_used()
        with self._backend.all_local():
            loss = self._loss_fn(self._model, *batch)
            self._backend.backward(self._model, loss, weight)
        self._gradients.waiting = True
        return loss.detach()

    def _run(self, batch: Sequence[Any], weight: float, sbp: Any) -> list[Tensor]:
        arguments = map_tensors(batch, flow.Tensor, self._to_global)
        if weight not in self._factors:  # a handful: full batches and the last of an accumulation
            self._factors[weight] = flow.tensor(weight).to_global(
                placement=self._placement, sbp=flow.sbp.broadcast, check_meta=False
            )
        modes = "".join("t" if each.training else "e" for each in self._modules)  # a graph keeps those it was traced in
        results = self._compiled(f"{sbp} {modes} {_shape_of(batch)}", arguments, self._factors[weight], sbp)
        if results is None:
            results = self._loss_and_gradients(self._model, arguments, self._factors[weight], sbp)
        return [each.to_local() for each in results]

    def _to_global(self, tensor: Tensor) -> Tensor:
        # All ranks hold parts of one shape, so nothing has to be asked of the others.
        return tensor.to_global(placement=self._placement, sbp=flow.sbp.split(0), check_meta=False)

    def _loss_and_gradients(self, model: Any, arguments: Any, factor: Tensor, sbp: Any) -> tuple[Tensor, ...]:
        """In global tensors: the loss, and the gradients of `factor * loss` as one flat tensor for each buffer."""
        loss = self._loss_fn(model, *arguments)
        flat = [parameter for chosen in self._parameters for parameter in chosen]
        gradients = iter(_gradients(loss, flat, factor.to(loss.dtype).reshape(loss.shape)))
        parts = [
            [next(gradients).to_global(sbp=flow.sbp.partial_sum).reshape(-1) for _ in chosen]
            for chosen in self._parameters
        ]
        share = loss.detach().to_global(sbp=flow.sbp.partial_sum) * float(self._backend.world.world_size)
        return (share, *(flow.cat(each).to_global(sbp=sbp) for each in parts))

    def _compiled(self, shape: str, arguments: Any, factor: Tensor, sbp: Any) -> tuple[Tensor, ...] | None:
        """The results of the graph for batches of this shape; None when there is none, and the step runs eagerly."""
        if not self._compile or (shape not in self._graphs and len(self._graphs) == GRAPHS):
            return None
        if len(self._backend._prepared) > 1:  # a graph does not wait for what is done to another model's parameters
            flow._oneflow_internal.eager.Sync()
        if shape in self._graphs:
            return self._count(self._graphs[shape](arguments, factor))
        _release_unused(self._backend)
        graph = _StepGraph(self._model, partial(self._loss_and_gradients, sbp=sbp), self._placement)
        _alive.append((weakref.ref(self), graph))
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "(?s).*not registered into a nn.Graph")  # another model of the loss
                results = graph(arguments, factor)
        except UnidistError:
            raise
        except Exception as error:  # whatever tracing a user's model raises
            reason = next((line for line in str(error).splitlines() if line.strip()), "")
            self._run_eagerly(f"nn.Graph cannot trace it ({type(error).__name__}: {reason.strip()[:200]})")
            return None
        finally:
            graph.body = None  # it was only needed for tracing, and would keep this step alive
        self._graphs[shape] = graph
        return self._count(results)

    def _run_eagerly(self, why: str) -> None:
        self._compile = False
        if self._backend.world.rank == 0:
            sys.stderr.write(f"unidist: this step runs eagerly, because {why}. graph=False says so from the start.\n")

    def _count(self, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """A graph updates the running mean and variance of a batch normalisation, but not its count of batches."""
        for module in self._counters:
            if module.training:
                module.num_batches_tracked.to_local().add_(1)
        return results


def _gradients(loss: Tensor, parameters: Sequence[Tensor], seed: Tensor) -> list[Tensor]:
    """With zeros for a parameter that the loss does not depend on, as in the mirrored view. OneFlow fails there, or,
    from the second time on, gives a local tensor."""
    try:
        found = flow.autograd.grad(loss, parameters, seed)
    except Exception as error:
        if "mut_grad_fn_node" not in str(error):
            raise
        nothing = sum((each.reshape(-1)[:1] * 0).to(loss.dtype).sum() for each in parameters)
        found = flow.autograd.grad(loss + nothing.reshape(loss.shape), parameters, seed)
    return [
        each if each is not None and each.is_global else parameter.detach() * 0
        for each, parameter in zip(found, parameters, strict=True)
    ]


class _StepGraph(nn.Graph):
    """Gradients are only computed inside an nn.Graph that trains something: here a number nobody looks at."""

    def __init__(self, model: Any, body: Callable[..., tuple[Tensor, ...]], placement: Any) -> None:
        super().__init__()
        self.model = model
        self.nothing = nn.Linear(1, 1, bias=False).to_global(placement=placement, sbp=flow.sbp.broadcast)
        self.add_optimizer(flow.optim.SGD(self.nothing.parameters(), lr=0.0))
        self.body: Callable[..., tuple[Tensor, ...]] | None = body

    def build(self, arguments: Any, factor: Tensor) -> tuple[Tensor, ...]:
        assert self.body is not None
        results = self.body(self.model, arguments, factor)
        self.nothing(factor.reshape(1, 1)).sum().backward()
        return results

    def _Graph__print(self, *message: Any) -> None:
        """Not a word beside what `_run_eagerly` says: each rank would print what could not be traced."""


# The end of an nn.Graph waits for its ends on the other ranks, whose garbage collectors know nothing of ours. So graphs
# are kept here, with the step that they belong to, and go when a new one is compiled, which all ranks do together.
_alive: list[tuple[weakref.ref[GlobalStep], _StepGraph]] = []


def _release_unused(backend: OneFlowBackend) -> None:
    if not _alive:
        return
    unused = backend.from_numpy(np.array([step() is None for step, _ in _alive], dtype=np.int64))
    everywhere = backend.to_numpy(backend.all_reduce(unused, "min"))
    if everywhere.any():
        _alive[:] = [each for each, gone in zip(_alive, everywhere, strict=True) if not gone]
        flow._oneflow_internal.eager.Sync()  # what they were still doing
        gc.collect()  # now, on every rank


def _tensors(batch: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(batch, flow.Tensor, found.append)
    return found


def _shape_of(value: Any) -> str:
    if isinstance(value, flow.Tensor):
        return f"{value.dtype}{tuple(value.shape)}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_shape_of(each)}" for key, each in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_shape_of, value)) + "]"
    return repr(value)

"""The consistent view: the model is made of global tensors, and a training step is compiled to an nn.Graph.

The batch of each rank becomes its part of one global batch (split along the first axis), parameters are whole on
every rank (broadcast), and OneFlow finds out what has to be exchanged. An update from one batch is a part of the
graph, see `updates`. Where gradients are accumulated, clipped, or applied by an optimizer that `updates` does not
know, they leave the graph, as sums over the ranks or as partial sums, and go on as in the mirrored view.
"""

from __future__ import annotations

import gc
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import oneflow as flow
from oneflow import nn

from unidist.plugin import MicroBatch, UnidistError, Update, items_of, leaves_of, map_leaves
from unidist_oneflow.agreement import Agreement
from unidist_oneflow.batchnorm import SingleRow
from unidist_oneflow.optimizers import set_rate
from unidist_oneflow.variables import Variables

if TYPE_CHECKING:
    from unidist_oneflow.models import OneFlowBackend, Prepared

GRAPHS = 4  # of a kind, for as many shapes of batches and settings of the optimizer; then others do without

Tensor = Any
Body = Callable[..., tuple[Tensor, ...]]  # (model, variables, arguments) -> loss, …


class GlobalStep:
    """One training step: `(batch, micro, update) -> loss, mean weight`. The loss is this rank's share of it, as a plain
    local tensor."""

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
        self._twins, self._variables = prepared.faces.twins, prepared.faces.variables
        self._trained = [parameter for chosen in self._gradients.layout for parameter in chosen]
        for parameter in self._trained:
            # A first use, of whatever kind: autograd.grad fails for a parameter that never had one, and what it has
            # done until then is counted twice the next time.
            with flow.enable_grad():
                self._twins[parameter].reshape(-1)
        self._update = prepared.update
        self._updating: dict[str, Any] = {}  # graphs that end with an update, by what they were compiled for
        self._differentiating: dict[str, Any] = {}  # graphs that end with gradients
        self._compile = compile
        self._modules = list(model.modules())
        if compile and any(isinstance(module, nn.Dropout) for module in self._modules):
            self._run_eagerly("dropout in an nn.Graph draws the same numbers whatever the seed, and again when resumed")
        self._agreement = Agreement(backend)
        self._apart = False  # the ranks' arguments make no global batch, so each computes by itself
        self._refuses_single_rows = any(
            isinstance(hook, SingleRow) for module in self._modules for hook in module._forward_pre_hooks.values()
        )
        self._with_modes = [module for module in self._modules if _has_modes(module)]
        self._counters = [
            module for module in self._modules if getattr(module, "num_batches_tracked", None) is not None
        ]

    def __call__(self, batch: Sequence[Any], micro: MicroBatch, update: Update | None) -> tuple[Tensor, Any]:
        with self._backend.forward(self._model, micro):
            shape = _shape_of(batch)
            if micro.even is False or not self._is_global(batch, shape, micro):
                loss = self._locally(batch, micro)
            else:
                arguments = map_leaves(self._to_global, batch)
                # Where nothing was accumulated before, the sum over the ranks is a part of the graph too.
                summed = update is not None and not self._gradients.waiting
                whole = None
                if update is not None and summed:
                    whole = self._whole_step(shape, arguments, micro.weight, update)
                if update is not None and whole is not None:
                    return whole, 1.0 if update.rescale is not None else micro.weight
                loss = self._globally(shape, arguments, micro, summed)
        return loss, 1.0 if update is None else self._backend.apply(self._model, self._optimizer, update)

    def _is_global(self, batch: Sequence[Any], shape: str, micro: MicroBatch) -> bool:
        """Whether the ranks' arguments are parts of global tensors, each of the same weight."""
        if self._apart:
            return False
        tensors = _tensors_of(batch)
        # A row of padding has the shape of a sample, so shapes alone do not tell.
        if not self._agreement.reached(f"{shape} of weight {micro.weight!r}", micro.even):
            self._apart = True
            self._run_eagerly("the ranks' batches differ in their shapes, weights or plain values")
        elif not all(tensor.ndim for tensor in tensors):
            self._apart = True
            self._run_eagerly("a tensor without axes cannot be a part of a global one")
        # A graph calls no hooks, and this one is not to be missed.
        alone = self._refuses_single_rows and any(tensor.ndim and tensor.shape[0] == 1 for tensor in tensors)
        return not self._apart and not alone

    def _locally(self, batch: Sequence[Any], micro: MicroBatch) -> Tensor:
        """Parts that differ in size, or are empty, make no global tensor: each rank computes its own, by weight."""
        with self._backend.all_local():
            loss = self._loss_fn(self._model, *batch)
            self._backend.backward(self._model, loss, micro)
        return loss.detach()

    def _whole_step(self, shape: str, arguments: Any, weight: float, update: Update) -> Tensor | None:
        """The loss, after everything was done by one graph; None where none can."""
        assert self._update is not None
        if not self._compile or update.clip_norm is not None or not self._update.possible:
            return None
        set_rate(self._optimizer, update.lr)
        # The ranks' batches are alike, so the mean weight that the gradients are to be divided by is this one.
        self._variables.set("factor", 1.0 if update.rescale is None else weight * update.rescale)
        self._update.begin()
        what = f"{self._update.compiled_in} {shape}"
        results = self._compiled(self._updating, what, arguments, self._loss_and_update)
        if results is None:
            return None
        self._update.end()
        loss = results[0].to_local()
        self._backend.pace.told(loss)
        return loss

    def _globally(self, shape: str, arguments: Any, micro: MicroBatch, summed: bool) -> Tensor:
        """The loss; its gradients are added to those that wait, as sums over the ranks or as this rank's part."""
        parts = self._backend.world.world_size / self._gradients.divisor
        self._variables.set("factor", micro.weight if summed else micro.weight * parts)
        sbp = flow.sbp.broadcast if summed else flow.sbp.partial_sum
        body = partial(self._loss_and_gradients, sbp=sbp)
        results = self._compiled(self._differentiating, f"{sbp} {shape}", arguments, body)
        if results is None:
            results = body(self._model, self._variables, arguments)
        loss, *flat = (result.to_local() for result in results)
        self._gradients.add(flat)
        self._gradients.added(micro, summed)
        self._backend.pace.told(loss)
        return loss

    def _to_global(self, leaf: Any) -> Any:
        if not isinstance(leaf, flow.Tensor):
            return leaf
        # All ranks hold parts of one shape, so nothing has to be asked of the others.
        return leaf.to_global(placement=self._placement, sbp=flow.sbp.split(0), check_meta=False)

    def _differentiate(self, model: Any, variables: Any, arguments: Any) -> tuple[Tensor, dict[Tensor, Tensor]]:
        """In global tensors: this rank's share of the loss, and the gradients of `factor * loss` by parameter."""
        loss = self._loss_fn(model, *arguments)
        found = flow.autograd.grad(
            loss,
            [self._twins[parameter] for parameter in self._trained],
            variables.factor.to(loss.dtype).reshape(loss.shape),
        )
        gradients = {
            # None or a local tensor where the loss does not depend on the parameter: zero, as in the mirrored view.
            parameter: array if array is not None and array.is_global else self._twins[parameter].detach() * 0
            for parameter, array in zip(self._trained, found, strict=True)
        }
        share = loss.detach().to_global(sbp=flow.sbp.partial_sum) * float(self._backend.world.world_size)
        return share, gradients

    def _loss_and_update(self, model: Any, variables: Any, arguments: Any) -> tuple[Tensor, ...]:
        share, gradients = self._differentiate(model, variables, arguments)
        assert self._update is not None
        self._update.trace(variables, gradients)
        return (share,)

    def _loss_and_gradients(self, model: Any, variables: Any, arguments: Any, sbp: Any) -> tuple[Tensor, ...]:
        """The loss, and the gradients as one flat tensor for each buffer."""
        share, gradients = self._differentiate(model, variables, arguments)
        parts = [
            [gradients[parameter].to_global(sbp=flow.sbp.partial_sum).reshape(-1) for parameter in chosen]
            for chosen in self._gradients.layout
        ]
        return (share, *(flow.cat(part).to_global(sbp=sbp) for part in parts))

    def _compiled(self, graphs: dict[str, Any], what: str, arguments: Any, body: Body) -> tuple[Tensor, ...] | None:
        """The results of the graph for `what`; None when there is none."""
        what += "".join("t" if module.training else "e" for module in self._with_modes)  # it keeps those of its tracing
        if not self._compile or (what not in graphs and len(graphs) == GRAPHS):
            return None
        if len(self._backend._prepared) > 1:  # a graph does not wait for what is done to another model's parameters
            flow._oneflow_internal.eager.Sync()
        tensors = _tensors_of(arguments)  # a graph would not look for them in everything that can hold some
        if what in graphs:
            return self._count(graphs[what](tensors))
        _release_unused(self._backend)
        graph = _StepGraph(self._model, self._variables, body, arguments, self._placement)
        _alive.append((weakref.ref(self), graph))
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "(?s).*not registered into a nn.Graph")  # another model of the loss
                results = graph(tensors)
        except UnidistError:
            raise
        except Exception as error:  # whatever tracing a user's model raises
            reason = next((line for line in str(error).splitlines() if line.strip()), "")
            self._run_eagerly(f"nn.Graph cannot trace it ({type(error).__name__}: {reason.strip()[:200]})")
            return None
        finally:
            graph.body = graph.arguments = None  # only needed for tracing, and would keep this step alive
        graphs[what] = graph
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


class _StepGraph(nn.Graph):  # type: ignore[misc]  # OneFlow is not there to be checked
    """Gradients are only computed inside an nn.Graph that trains something: here a number nobody looks at."""

    def __init__(self, model: Any, variables: Variables, body: Body, arguments: Any, placement: Any) -> None:
        super().__init__()
        self.model, self.variables = model, variables
        self.nothing = nn.Linear(1, 1, bias=False, dtype=flow.float32).to_global(
            placement=placement, sbp=flow.sbp.broadcast
        )
        self.add_optimizer(flow.optim.SGD(self.nothing.parameters(), lr=0.0))
        self.body: Body | None = body
        self.arguments = arguments

    def build(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        assert self.body is not None
        coming = iter(tensors)
        arguments = map_leaves(lambda leaf: next(coming) if isinstance(leaf, flow.Tensor) else leaf, self.arguments)
        results = self.body(self.model, self.variables, arguments)
        self.nothing(self.variables.factor.reshape(1, 1)).sum().backward()
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
        _alive[:] = [graph for graph, gone in zip(_alive, everywhere, strict=True) if not gone]
        flow._oneflow_internal.eager.Sync()  # what they were still doing
        gc.collect()  # now, on every rank


def _has_modes(module: Any) -> bool:
    """Whether a module may compute something else in training. Of OneFlow's own, few do, and they ask in `forward`."""
    kind = type(module)
    return not kind.__module__.startswith("oneflow.nn.") or "training" in kind.forward.__code__.co_names


def _shape_of(value: Any) -> str:
    if isinstance(value, flow.Tensor):
        return f"{value.dtype}{tuple(value.shape)}"
    items = items_of(value)
    return repr(value) if items is None else "{" + ",".join(f"{key}:{_shape_of(part)}" for key, part in items) + "}"


def _tensors_of(value: Any) -> tuple[Tensor, ...]:
    return tuple(leaf for leaf in leaves_of(value) if isinstance(leaf, flow.Tensor))

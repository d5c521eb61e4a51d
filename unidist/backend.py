"""The whole contract of a plug-in. To add a backend, write these two and name the first in an entry point:

- a `Plugin`: what is known about the backend before its framework is imported (the launcher reads it);
- a `Backend`: what runs inside each process, between `Strategy`, which has checked every argument, and the framework.

    [project.entry-points."unidist.backends"]
    mine = "my_package:plugin"

`unidist.testing` holds the suite that tells whether it keeps the promises; `backends/unidist_torch` is an example.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import numpy as np

    from unidist.compression import Compression
    from unidist.data.source import OwnLoader
    from unidist.launch.plan import Job, Process
    from unidist.world import World

    Array = np.ndarray[Any, Any]

Reduction = Literal["sum", "min", "max"]
Tensor = Any  # the framework's own
Model = Any
Optimizer = Any


@dataclass(frozen=True)
class Capabilities:
    """What a backend promises. Each field is True, or a sentence: why not, and what to do instead.

    `Strategy` raises `UnsupportedOperation` with that sentence, and `unidist backends` prints it.
    """

    synchronous: bool | str = True  # a step equals the serial step on the concatenated batches
    lockstep: bool | str = True  # the ranks make their steps together; where not, each applies its own mean gradient
    uneven_batches: bool | str = True  # ... also when the ranks' batches differ in size
    spelled_out: bool | str = True  # forward / backward / step, beside train_step
    accumulate: bool | str = True
    clip_norm: bool | str = True
    native_optimizer: bool | str = True
    optimizer_state: bool | str = True  # saved in a checkpoint
    native_loader: bool | str = True  # the framework's own data loaders, and its worker processes for any data set
    sync_batchnorm: bool | str = True
    mixed_precision: bool | str = True
    compression: bool | str = True
    local_sgd: bool | str = True  # sync_every, average_gradients, average_parameters
    compile: bool | str = True
    gpu: bool | str = True


@dataclass(frozen=True)
class Plugin:
    """A backend as seen from outside: importing it must not import the framework."""

    name: str
    backend: str  # "package.module:Class" of the Backend, imported when a Strategy starts
    options: type  # a frozen dataclass; its fields are the options, its __post_init__ refuses bad values
    requires: tuple[str, ...]  # top-level modules without which the backend cannot start
    capabilities: Capabilities = Capabilities()
    implied_by: str | None = None  # an environment variable of the engine's own launcher that selects this backend
    plan: Callable[[Job], Sequence[Process]] | None = None  # the processes of a job; None: `nproc` equal workers
    # "package.module:function" for a process whose role is not "worker" and that runs the user's script all the same:
    # called with (world, options) in place of the training code, it returns when the job is over.
    serve: str | None = None
    bench: str | None = None  # module with `contestants(strategy)`, hand-written loops first, for `unidist bench`


@dataclass(frozen=True)
class Features:
    """What `prepare` was asked for beyond the plain step; each has been checked against the capabilities."""

    sync_batchnorm: bool = False  # batch statistics over all ranks
    precision: Literal["bf16", "fp16"] | None = None  # of the forward pass; parameters stay as they are
    compression: Compression | None = None  # of gradients on their way
    local: bool = False  # gradients stay with their rank: nothing is exchanged unless an average is called for


class Update(NamedTuple):
    """What to do with the gathered gradients: multiply by `rescale`, clip to `clip_norm`, apply with rate `lr`."""

    rescale: float = 1.0
    clip_norm: float | None = None
    lr: float | None = None  # None leaves the optimizer's rate alone


class Backend(ABC):
    """One process of a job on one framework. Tensors, models and optimizers are the framework's own objects."""

    framework: str  # "torch", "mxnet", "oneflow": what the user's model is written in
    device: str  # where batches arrive, as the framework spells it
    version: str  # of the framework
    transport: str  # what carries the gradients, and why it was chosen
    capabilities: Capabilities
    world: World
    devices: int = 1  # how many devices this process drives
    # About the batch that a step is being made of, set by Strategy before the step:
    uneven: bool = False  # the ranks' parts differ in size
    padding_only: bool = False  # this rank has no sample in it, only a row to take part with

    @abstractmethod
    def __init__(self, world: World, options: Any, device: str | None, timeout: float) -> None:
        """Import the framework and meet the other ranks, within `timeout` seconds. Sets the attributes above."""

    @abstractmethod
    def close(self, failed: bool) -> None:
        """Leave. After a failure never wait for anyone: the others may be gone."""

    # -- tensors ---------------------------------------------------------------------------------------------

    @abstractmethod
    def is_tensor(self, value: object) -> bool: ...

    @abstractmethod
    def to_numpy(self, tensor: Tensor) -> Array:
        """A copy on the host that nothing will change later."""

    @abstractmethod
    def from_numpy(self, array: Array) -> Tensor:
        """The array on the device, same dtype. It may share memory: the caller gives the array away."""

    # -- collectives: every rank calls them with the same shape and dtype; the input is left unchanged ---------

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: Reduction) -> Tensor: ...

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> list[Tensor]: ...

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int) -> Tensor: ...

    @abstractmethod
    def barrier(self) -> None: ...

    # -- models ----------------------------------------------------------------------------------------------

    @abstractmethod
    def prepare(self, model: Model, optimizer: Optimizer | None, features: Features) -> tuple[Model, Optimizer | None]:
        """Move to the device, make every rank equal to rank 0, arrange for gradients to be averaged.

        `optimizer` is one of unidist's specs, to be turned into the framework's own, or a native one.
        """

    @abstractmethod
    def unwrap(self, model: Model) -> Model:
        """The user's own model inside what `prepare` returned."""

    @abstractmethod
    def state(self, model: Model) -> Mapping[str, Tensor]:
        """Parameters and buffers by name, without any wrapper's prefix."""

    @abstractmethod
    def load_state(self, model: Model, arrays: Mapping[str, Array]) -> None:
        """Overwrite what `state` lists; names and shapes have been checked."""

    def settings(self, optimizer: Optimizer) -> Mapping[str, object]:
        """Plain values of a native optimizer that must be the same on every rank, such as its rate."""
        return {}

    @abstractmethod
    def optimizer_state(self, model: Model, optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(tensors, plain values) that make the optimizer go on as if nothing had happened. A tensor is named after
        its parameter and what it is: "0.weight/velocity"; "first_moment" and "second_moment" for Adam."""

    @abstractmethod
    def load_optimizer_state(
        self, model: Model, optimizer: Optimizer, arrays: Mapping[str, Array], values: Mapping[str, Any]
    ) -> None:
        """Take back what `optimizer_state` gave."""

    @abstractmethod
    def rng_state(self) -> dict[str, Array]:
        """The framework's random generators, which dropout draws from."""

    @abstractmethod
    def load_rng_state(self, arrays: Mapping[str, Array]) -> None: ...

    @abstractmethod
    def average(self, model: Model, what: Literal["gradients", "parameters"]) -> None:
        """Replace each by its mean over ranks, in place. For local SGD and loops of one's own."""

    @abstractmethod
    def evaluate(self, model: Model) -> AbstractContextManager[None]:
        """Inside: evaluation mode, no gradients, no communication when the model is called. Modes are restored."""

    # -- a training step -------------------------------------------------------------------------------------

    @abstractmethod
    def forward(self, model: Model, sync: bool) -> AbstractContextManager[None]:
        """The user computes a loss inside. `sync` is False while gradients are only being accumulated."""

    @abstractmethod
    def backward(self, model: Model, loss: Tensor, weight: float) -> None:
        """Add the gradient of `weight * loss`; when synchronising, the sum so far becomes its mean over ranks."""

    @abstractmethod
    def apply(self, model: Model, optimizer: Optimizer, update: Update) -> None:
        """Do what `update` says, then clear the gradients."""

    def train_step(
        self, model: Model, optimizer: Optimizer, loss_fn: Callable[..., Tensor], compile: bool
    ) -> Callable[[Sequence[Any], float, bool, Update | None], Tensor]:
        """The three above as one callable `(batch, weight, sync, update) -> loss`; update None: accumulate only.

        Override it where the engine does better, or only can, with the whole step in hand.
        """

        def run(batch: Sequence[Any], weight: float, sync: bool, update: Update | None) -> Tensor:
            with self.forward(model, sync):
                loss = loss_fn(model, *batch)
            self.backward(model, loss, weight)
            if update is not None:
                self.apply(model, optimizer, update)
            return loss.detach()  # users keep losses; the graph behind them must go

        return run

    def clear_gradients(self, model: Model) -> None:  # noqa: B027
        """Called before a group of micro-batches where something may be left: by the backward of another model, or by a
        group that an error has ended. Override it where backward adds to what is there."""

    # -- the framework's own data loaders ----------------------------------------------------------------------

    def open_loader(self, loader: object) -> OwnLoader | None:
        """What is inside a data loader of the framework; None when this is not one."""
        return None

    def read_batches(
        self, source: OwnLoader, batches: Sequence[Sequence[int]] | None
    ) -> AbstractContextManager[Iterator[Any]]:
        """Collated batches of the samples numbered in `batches`, on the device, read by `source.workers` processes.

        For iterable data `batches` is None: (number of elements, batch) of those that `source.stream` leaves to this
        rank, see `data.source.elements_of`.
        """
        raise NotImplementedError

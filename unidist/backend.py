"""The whole contract of a plug-in. To add a backend, write these two and name the first in an entry point:

- a `Plugin`: what is known about the backend before its framework is imported (the launcher reads it);
- a `Backend`: what runs inside each process, between `Strategy`, which has checked every argument, and the framework.

    [project.entry-points."unidist.backends"]
    mine = "my_package:plugin"

`unidist.plugin` lists all that a backend may import. `unidist.testing` holds the suite that tells whether it keeps the
promises. docs/write-a-backend.md writes one in an hour.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import numpy as np

    from unidist.compression import Compression
    from unidist.control.company import Company
    from unidist.data.source import NativeLoader
    from unidist.launch.plan import Job, Process
    from unidist.setup.recipes import Recipe
    from unidist.world import World
    from unidist.world.launcher import Launcher

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
class ArrayNames:
    """What a framework calls arrays of a model when others do not, for checkpoints that go from one to another."""

    wrappers: tuple[str, ...] = ()  # prefixes of all names of a wrapped model
    # Buffers of zero dimensions, by the last part of their names and their dtypes. They are left out where a model
    # lacks them, and zero where a checkpoint does.
    extra: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Plugin:
    """A backend as seen from outside: importing it must not import the framework."""

    name: str
    backend: str  # "package.module:Class" of the Backend, imported when a Strategy starts
    # A frozen dataclass; its fields are the options, its __post_init__ refuses bad values. An option that takes one of
    # a few words has a `Literal` of them as its type: who takes such a word for a backend is told where it belongs.
    options: type
    requires: tuple[str, ...]  # top-level modules without which the backend cannot start
    capabilities: Capabilities = Capabilities()  # with the default options
    # The same for these options, where they make a difference, and so many workers; None: not known yet.
    capabilities_for: Callable[[Any, int | None], Capabilities] | None = None
    own_options: tuple[str, ...] = ()  # options that may differ between the processes of a job
    launcher: Launcher | None = None  # the engine's own; where it started the process, it selects this backend
    interface_variables: tuple[str, ...] = ()  # what `unidist run --interface` sets for the engine
    # Regular expressions for what a rank prints when it loses another one: that is not the cause of a failure.
    echoes: tuple[str, ...] = ()
    names: ArrayNames = ArrayNames()  # of arrays that others do not have, in checkpoints
    plan: Callable[[Job], Sequence[Process]] | None = None  # the processes of a job; None: `nproc` equal workers
    # The processes that an engine needs beside the workers, for these options: they come to the meeting, too. Called
    # first of all, it also refuses what cannot be.
    company: Callable[[World, Any], Company | None] | None = None
    # Where options describe the cluster: given what the launcher has said, the World that the ranks are to meet as.
    place: Callable[[World, Any], World] | None = None
    # "package.module:function" for a process whose role is not "worker" and that runs the user's script all the same:
    # called with (world, options) in place of the training code once all have met, it returns when the job is over.
    serve: str | None = None
    bench: str | None = None  # module with `contestants(strategy)`, hand-written loops first, for `unidist bench step`
    recipe: Recipe | None = None  # the environment that `unidist setup NAME` builds
    bench_launch: str | None = None  # module for `unidist bench launch`, see `unidist.bench.launch`


@dataclass(frozen=True)
class Features:
    """What `prepare` was asked for beyond the plain step; each has been checked against the capabilities."""

    sync_batchnorm: bool = False  # batch statistics over all ranks
    precision: Literal["bf16", "fp16"] | None = None  # of the forward pass; parameters stay as they are
    compression: Compression | None = None  # of gradients on their way
    accumulate: bool = False  # some groups have several micro-batches
    local: bool = False  # gradients stay with their rank: nothing is exchanged unless an average is called for


@dataclass
class MicroBatch:
    """One forward and one backward of a training step.

    In the spelled-out step it becomes known as the step goes on: `weight == 0` when the model is called, the rest at
    `backward`.
    """

    weight: float = 1.0  # how many samples the loss is the mean of, in units that all ranks share; 0: only padding
    sync: bool = True  # the last one of its group: gradients and weights of the group are exchanged
    even: bool | None = None  # whether the ranks' batches have one shape, where that is known
    summed: bool = False  # the loss is the sum of its samples, not their mean
    spelled_out: bool = False  # the user's code runs between `backward` and `apply`, and may change gradients there
    told: bool = False  # the user has said what it is the mean of, so the rows do not tell what a part of it weighs


class Update(NamedTuple):
    """What to do with the gradients of a group of micro-batches: scale them, clip them to `clip_norm`, apply them.

    A group leaves `sum(weight * gradient)` on each rank, and an exchange makes that its mean over the ranks. The wanted
    gradient is divided by the mean over the ranks of `sum(weight)`. Nobody knows it beforehand, so it travels with the
    gradients, and `rescale` is None. A number is what to multiply by instead.
    """

    rescale: float | None = None
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

    @abstractmethod
    def __init__(self, world: World, options: Any, device: str | None, timeout: float) -> None:
        """Start the engine, within `timeout` seconds. Sets the attributes above.

        The ranks have met: `world` says who is where, and `world.peers` (None when this process is alone) exchanges
        values with the others outside of the engine.
        """

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
    def check_prepare(self, model: Model, optimizer: Optimizer | None) -> None:
        """Refuse what `prepare` could not use. This rank does it alone, before anything is communicated."""

    def check_optimizer(self, model: Model, optimizer: Optimizer) -> None:  # noqa: B027
        """Before each update: refuse parameters that the optimizer was given since `prepare` and that are not the
        model's. Nobody would exchange their gradients. What this costs must not grow with the number of parameters."""

    @abstractmethod
    def prepare(self, model: Model, optimizer: Optimizer | None, features: Features) -> tuple[Model, Optimizer | None]:
        """Move to the device, make every rank equal to rank 0, arrange for gradients to be averaged.

        `optimizer` is one of unidist's specs, to be turned into the framework's own, or a native one.
        """

    @abstractmethod
    def unwrap(self, model: Model) -> Model:
        """The user's own model inside what `prepare` returned."""

    # -- what a checkpoint holds: every rank calls all of these in the same order, so they may communicate. A save calls
    # `optimizer_state`, `state` and `rng_state`, and rank 0 alone converts (`to_numpy`) and writes what they give. A
    # load lets every rank read the file and check it, by what `check_state`, `load_optimizer_state` and
    # `load_rng_state` refuse; when all ranks have found all of it good, `load_state` and the functions that the last
    # two gave put it in its place.

    @abstractmethod
    def state(self, model: Model) -> Mapping[str, Tensor]:
        """Parameters and buffers as they are on the device, not copied to the host. They have their portable names:
        torch's, without any wrapper's prefix."""

    @abstractmethod
    def parameters(self, model: Model) -> Mapping[str, Tensor]:
        """Those of `state` that training changes, and that are equal on all ranks after each update."""

    def check_state(self, model: Model, arrays: Mapping[str, Array], filled: Collection[str]) -> None:  # noqa: B027
        """Raise `CheckpointError` where this model would not be what the arrays say, although their names, shapes and
        kinds are those of `state`. `filled` are names that the checkpoint lacks, as other frameworks do."""

    @abstractmethod
    def load_state(self, model: Model, arrays: Mapping[str, Array]) -> None:
        """Overwrite what `state` lists; names and shapes have been checked."""

    def settings(self, optimizer: Optimizer) -> Mapping[str, object]:
        """Plain values of a native optimizer that must be the same on every rank, such as its rate."""
        return {}

    @abstractmethod
    def optimizer_state(self, model: Model, optimizer: Optimizer) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
        """(tensors, plain values) that make the optimizer go on as if nothing had happened. A tensor is named after
        its parameter and what it is: "0.weight/velocity"; "first_moment", "second_moment" and "step" for Adam. Among
        the values are its "kind" and its parameter "groups", a list of settings. Other ranks than 0 may give nothing
        where it costs."""

    @abstractmethod
    def load_optimizer_state(
        self, model: Model, optimizer: Optimizer, arrays: Mapping[str, Array], values: Mapping[str, Any]
    ) -> Callable[[], None]:
        """Check what may be what `optimizer_state` gave, here or on another backend, with `checkpoint.expect`; raise
        `CheckpointError` when it is not, without communication, and change nothing. What is returned takes it back."""

    @abstractmethod
    def rng_state(self) -> dict[str, Array]:
        """The framework's random generators, which dropout draws from."""

    @abstractmethod
    def load_rng_state(self, arrays: Mapping[str, Array]) -> Callable[[], None]:
        """Check or try out what may be what `rng_state` gave, and change nothing; `CheckpointError` when it is not, or
        there is none of it, as in a checkpoint of another framework. What is returned takes it back."""

    @abstractmethod
    def average(self, model: Model, what: Literal["gradients", "parameters"]) -> None:
        """Replace each by its mean over ranks, in place. For local SGD and loops of one's own."""

    def evens_out(self, model: Model) -> bool:
        """Whether the ranks communicate when they enter `evaluate` with this model."""
        return any(True for _ in model.buffers())

    @abstractmethod
    def evaluate(self, model: Model) -> AbstractContextManager[None]:
        """Inside: evaluation mode, no gradients, no communication when the model is called. Modes are restored."""

    # -- a training step -------------------------------------------------------------------------------------

    @abstractmethod
    def forward(self, model: Model, micro: MicroBatch) -> AbstractContextManager[None]:
        """The user computes a loss inside. Refuse here what would train wrongly without a word: a parameter that was
        frozen or unfrozen after `prepare`, gradients that were cleared in the middle of a group."""

    @abstractmethod
    def backward(self, model: Model, loss: Tensor, micro: MicroBatch) -> None:
        """Add the gradient of `micro.weight * loss`. With `micro.sync`, gradients and weights become their means over
        the ranks, at the latest when `apply` uses them."""

    @abstractmethod
    def apply(self, model: Model, optimizer: Optimizer, update: Update) -> float | Tensor:
        """Do what `update` says, then clear the gradients. Returns the mean weight that the gradients were divided by
        (1.0 where `update.rescale` is given), as a number, or as a tensor where reading it would wait.

        Any other call of the optimizer's own step is refused from `prepare` on: it would part the ranks.
        """

    def train_step(
        self, model: Model, optimizer: Optimizer, loss_fn: Callable[..., Tensor], compile: bool
    ) -> Callable[[Sequence[Any], MicroBatch, Update | None], tuple[Tensor, float | Tensor]]:
        """The three above as one callable `(batch, micro, update) -> (loss, what apply returned)`; update None:
        accumulate only.

        Override it where the engine does better, or only can, with the whole step in hand.
        """

        def run(batch: Sequence[Any], micro: MicroBatch, update: Update | None) -> tuple[Tensor, float | Tensor]:
            with self.forward(model, micro):
                loss = loss_fn(model, *batch)
            self.backward(model, loss, micro)
            total = 1.0 if update is None else self.apply(model, optimizer, update)
            return loss.detach(), total  # users keep losses; the graph behind them must go

        return run

    def on_inputs(self, model: Model, listener: Callable[[tuple[Any, ...]], None]) -> None:
        """Tell `listener` the positional arguments of each call of the model, of which the spelled-out step is made."""
        model.register_forward_pre_hook(lambda _, arguments: listener(arguments))

    def clear_gradients(self, model: Model) -> None:  # noqa: B027
        """Called before a group of micro-batches where something may be left: by the backward of another model, or by a
        group that an error has ended. Override it where backward adds to what is there."""

    @abstractmethod
    def keep_gradients(self, model: Model, other: Model) -> AbstractContextManager[None]:
        """A micro-batch of `other` is computed inside, whose loss may run through `model`, which is in the middle of an
        accumulation group: afterwards its gradients are what they were. Raises `StateError` where the two share trained
        parameters, whose gradients could not be told apart."""

    # -- the framework's own data loaders ----------------------------------------------------------------------

    def open_loader(self, loader: object) -> NativeLoader | None:
        """What is inside a data loader of the framework; None when this is not one."""
        return None

    def read_batches(
        self, source: NativeLoader, batches: Sequence[Sequence[int]] | None
    ) -> AbstractContextManager[Iterator[Any]]:
        """Collated batches of the samples numbered in `batches`, on the device, read by `source.workers` processes.

        For iterable data `batches` is None: (number of elements, batch) of those that `source.stream` leaves to this
        rank, see `data.source.elements_of`.
        """
        raise NotImplementedError

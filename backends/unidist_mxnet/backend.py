"""MXNet KVStore behind the contract of `unidist.backend`."""

from __future__ import annotations

import json
import os
import socket
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Literal

import mxnet as mx
import numpy as np
from mxnet import autograd, nd

from unidist import Backend, Features, Update, World
from unidist.backend import Reduction
from unidist.control import Control, ControlServer, connect_from_env
from unidist.data.source import OwnLoader
from unidist.errors import StateError, UsageError
from unidist.watch import own_interface
from unidist_mxnet import MxnetOptions, capabilities, loading, memory
from unidist_mxnet.arrays import from_numpy, kind_like
from unidist_mxnet.cluster import with_neighbours
from unidist_mxnet.devices import pick_contexts
from unidist_mxnet.exchange import Exchange
from unidist_mxnet.models import check_model, check_optimizer, collect, is_deferred, split
from unidist_mxnet.optimizers import describe, from_spec
from unidist_mxnet.served import UpdatedByServer
from unidist_mxnet.store import Store
from unidist_mxnet.trained import Trained, UpdatedByWorker

_open = False


class MxnetBackend(Backend):
    framework = "mxnet"

    def __init__(self, world: World, options: MxnetOptions, device: str | None, timeout: float) -> None:
        global _open
        self.world, self.options, self.version = world, options, mx.__version__
        contexts = pick_contexts(device, options.devices, mx.context.num_gpus(), world)
        self._contexts = [mx.Context(kind, index) for kind, index in contexts]
        self.device, self.devices = ", ".join(map(str, self._contexts)), len(contexts)
        self.capabilities = capabilities(options)
        if _open:
            raise StateError("a Strategy is open in this process already: close it before opening another")
        self._trained: weakref.WeakKeyDictionary[Any, Trained] = weakref.WeakKeyDictionary()
        self._server: ControlServer | None = None
        self._store = Store(world, options, self.devices, timeout)
        control = self._control()
        self._exchange = Exchange(control, *self._place(), options.collective_timeout)
        told_by_servers = self._store.distributed and control is not None and self._server is None
        self._server_memory = memory.ask(control, int(os.environ["DMLC_NUM_SERVER"])) if told_by_servers else []
        self._rank_0_leads = True
        self._find_neighbours()
        self.transport = self._describe_transport()
        _open = True

    # -- meeting -----------------------------------------------------------------------------------------------

    def _place(self) -> tuple[int, int]:
        """ps-lite numbers the workers; the launcher's own number, where there is one, is the one that users know."""
        rank = self.world.rank if self.world.rank >= 0 else self._store.rank
        self.world = replace(self.world, rank=rank)
        return rank, self.world.world_size

    def _control(self) -> Control | None:
        """The launcher's control plane. Where there is none, the first worker brings one up."""
        if self.world.world_size == 1:
            return None
        control = connect_from_env()
        if control is not None:
            return control
        card = b""
        if self._store.rank == 0:
            self._server = ControlServer(own_interface(self.world)).start()
            card = json.dumps([self._server.url, self._server.token]).encode()
        return Control(*json.loads(self._store.tell_all(card)))

    def _find_neighbours(self) -> None:
        told = self._exchange.meet([self._store.rank, socket.gethostname()])
        self._rank_0_leads = told[0][0] == 0
        self.world = with_neighbours(self.world, [host for _, host in told])

    def _describe_transport(self) -> str:
        said = f"KVStore {self._store.name}" + (" (chosen)" if self.options.kvstore == "auto" else " (asked for)")
        if self._store.distributed:
            servers = int(os.environ["DMLC_NUM_SERVER"])
            side = "servers" if self.options.server_updates else "workers"
            said += f" with {servers} server{'s' * (servers > 1)}, updates on the {side}"
        if self.devices > 1:
            said += f", {self.devices} devices per worker"
        return said

    def close(self, failed: bool) -> None:
        global _open
        _open = False
        if not failed:
            self._report_staleness()
            nd.waitall()
            self._exchange.meet()
        self._store.close(failed)
        self._exchange.close()
        if self._server is not None:
            self._server.close()

    def _report_staleness(self) -> None:
        counts = [each.staleness for each in self._trained.values() if getattr(each, "staleness", None)]
        for each in counts:
            each.settle()
        mine = [sum(e.updates for e in counts), sum(e.total for e in counts), max((e.worst for e in counts), default=0)]
        everyone = self._exchange.meet(mine)
        if self.world.rank == 0 and any(updates for updates, _, _ in everyone):
            each = [f"worker {r} {t / u:.2f} (at most {w})" for r, (u, t, w) in enumerate(everyone) if u]
            sys.stderr.write(f"unidist: updates by others between two of one's own, on average: {', '.join(each)}\n")

    # -- tensors

    def is_tensor(self, value: object) -> bool:
        return isinstance(value, nd.NDArray)

    def to_numpy(self, tensor: nd.NDArray) -> np.ndarray:
        return np.asarray(tensor.asnumpy())

    def from_numpy(self, array: np.ndarray) -> nd.NDArray:
        return from_numpy(array, self._contexts[0])

    # -- collectives

    def all_reduce(self, tensor: nd.NDArray, op: Reduction) -> nd.NDArray:
        return kind_like(tensor, self._exchange.reduce(tensor.asnumpy(), op))

    def all_gather(self, tensor: nd.NDArray) -> list[nd.NDArray]:
        mine = tensor.asnumpy()
        parts = self._exchange.gather(mine.tobytes())
        return [kind_like(tensor, np.frombuffer(each, mine.dtype).reshape(mine.shape)) for each in parts]

    def broadcast(self, tensor: nd.NDArray, source: int) -> nd.NDArray:
        mine = tensor.asnumpy()
        data = self._exchange.broadcast(mine.tobytes(), source)
        return kind_like(tensor, np.frombuffer(data, mine.dtype).reshape(mine.shape))

    def barrier(self) -> None:
        self._exchange.meet()

    # -- models

    def prepare(self, model: Any, optimizer: Any, features: Features) -> tuple[Any, Any]:
        check_model(model)
        parameters = collect(model)
        trainable = [each for each in parameters.values() if each.grad_req != "null"]
        if optimizer is not None and not trainable:
            raise UsageError("the model has no parameter that requires a gradient: nothing to optimize")
        native = check_optimizer(optimizer, parameters)
        for each in parameters.values():
            if each.list_ctx() != self._contexts:
                each.reset_ctx(self._contexts)
        trained, optimizer = self._make(parameters, optimizer, native, features.local)
        self._trained[model] = trained
        if any(is_deferred(each) for each in parameters.values()):
            self._start_at_first_call(model, trained)
        else:
            self._start(trained)
        return model, optimizer

    def _start(self, trained: Trained) -> None:
        trained.start(self._rank_0_leads)
        copies = 4 if isinstance(trained, UpdatedByServer) else 2  # with the two moments of Adam
        problem = memory.warning(trained.bytes, copies, self._server_memory)
        if problem and self.world.rank == 0:
            sys.stderr.write(f"unidist: {problem}\n")

    def _make(self, parameters: dict[str, Any], optimizer: Any, native: Any, local: bool) -> tuple[Trained, Any]:
        alone = local or self.capabilities.lockstep is not True
        arguments = (parameters, self._store, self._exchange, 1 if alone else self.world.world_size)
        if optimizer is None:
            return Trained(*arguments), None
        if self._store.distributed and self.options.server_updates:
            held = UpdatedByServer(*arguments, asynchronous=self.options.asynchronous)
            told = describe(optimizer if native is None else native)
            returned = from_spec(optimizer) if native is None else optimizer
            held.use(returned if native is None else native, told)
            return held, returned
        trained = UpdatedByWorker(*arguments)
        each = [from_spec(optimizer) for _ in self._contexts] if native is None else [native]
        trained.use(each)
        if isinstance(optimizer, mx.gluon.Trainer):
            optimizer._updaters = trained.updaters  # so that its own save_states finds them
        return trained, each[0] if native is None else optimizer

    def _start_at_first_call(self, model: Any, trained: Trained) -> None:
        """Some shapes are known only when data comes. All ranks get there together, and have one model after it."""

        def first(block: Any, inputs: Sequence[Any]) -> None:
            handle.detach()
            with autograd.pause(train_mode=False):
                block.forward(*inputs)
            self._start(trained)

        handle = model.register_forward_pre_hook(first)

    def unwrap(self, model: Any) -> Any:
        return model

    def state(self, model: Any) -> Mapping[str, nd.NDArray]:
        check_model(model)
        return {name: each.list_data()[0] for name, each in collect(model).items() if not is_deferred(each)}

    def load_state(self, model: Any, arrays: Mapping[str, np.ndarray]) -> None:
        parameters = collect(model)
        for name, array in arrays.items():
            each = parameters[name]
            each.set_data(nd.array(array, dtype=each.dtype))
        trained = self._trained.get(model)
        if isinstance(trained, UpdatedByServer):
            trained.push_values(self.world.rank == 0)

    def optimizer_state(self, model: Any, optimizer: Any) -> tuple[dict[str, nd.NDArray], dict[str, Any]]:
        return self._trained[model].optimizer_state()

    def load_optimizer_state(
        self, model: Any, optimizer: Any, arrays: Mapping[str, np.ndarray], values: Mapping[str, Any]
    ) -> None:
        self._trained[model].load_optimizer_state(arrays, values)

    def rng_state(self) -> dict[str, np.ndarray]:
        # MXNet's generators can be seeded, not read. So both this run and a resumed one go on from a drawn seed.
        seed = int(mx.nd.random.randint(0, 2**31 - 1, dtype="int32").asscalar())
        mx.random.seed(seed)
        return {"mxnet": np.array([seed])}

    def load_rng_state(self, arrays: Mapping[str, np.ndarray]) -> None:
        if "mxnet" in arrays:
            mx.random.seed(int(arrays["mxnet"][0]))

    def clear_gradients(self, model: Any) -> None:
        trained = self._trained[model]
        if trained.adding:  # else the next backward overwrites them
            trained.clear()

    def average(self, model: Any, what: Literal["gradients", "parameters"]) -> None:
        if model not in self._trained:
            raise UsageError("average: this model was not returned by prepare()")
        self._trained[model].average(what, self.world.world_size)

    @contextmanager
    def evaluate(self, model: Any) -> Iterator[None]:
        self._even_out(model)
        with autograd.pause(train_mode=False):
            yield

    def _even_out(self, model: Any) -> None:
        """Running statistics differ between ranks and devices, in dist_async all parameters do. Evaluation must not."""
        trained = self._trained.get(model)
        if isinstance(trained, UpdatedByServer) and self.options.asynchronous:
            nd.waitall()  # what we sent has been applied when its answer is here
            self._exchange.meet()
            trained.pull()
            nd.waitall()
            self._exchange.meet()
        held = [each for each in collect(model).values() if each.grad_req == "null" and not is_deferred(each)]
        if not held or (self.world.world_size == 1 and self.devices == 1):
            return
        values = [each.list_data()[0].asnumpy() for each in held]
        data = self._exchange.broadcast(b"".join(value.tobytes() for value in values), 0)
        for each, value in zip(held, values, strict=True):
            own, data = data[: value.nbytes], data[value.nbytes :]
            each.set_data(nd.array(np.frombuffer(own, value.dtype).reshape(value.shape), dtype=value.dtype))

    # -- a training step

    def forward(self, model: Any, sync: bool) -> AbstractContextManager[None]:
        self._trained[model].open(sync)
        return autograd.record()

    def backward(self, model: Any, loss: nd.NDArray, weight: float) -> None:
        self._trained[model].backward([loss], [weight])

    def apply(self, model: Any, optimizer: Any, update: Update) -> None:
        self._trained[model].apply(update)

    def train_step(
        self, model: Any, optimizer: Any, loss_fn: Callable[..., nd.NDArray], compile: bool
    ) -> Callable[[Sequence[Any], float, bool, Update | None], nd.NDArray]:
        if compile:
            if not isinstance(model, mx.gluon.HybridBlock):
                raise UsageError(f"compile=True hybridizes, and {type(model).__name__} is no gluon.HybridBlock")
            model.hybridize()
        if self.devices == 1:
            return super().train_step(model, optimizer, loss_fn, compile)
        trained = self._trained[model]

        def run(batch: Sequence[Any], weight: float, sync: bool, update: Update | None) -> nd.NDArray:
            trained.open(sync)
            with autograd.record():
                parts = [(share, loss_fn(model, *part)) for share, part in split(batch, self._contexts)]
            trained.backward([loss for _, loss in parts], [weight * share for share, _ in parts])
            if update is not None:
                trained.apply(update)
            first = self._contexts[0]
            return sum(loss.as_in_context(first) * share for share, loss in parts)

        return run

    # -- the framework's own data loaders

    def open_loader(self, loader: object) -> OwnLoader | None:
        return loading.open_loader(loader)

    def read_batches(self, source: OwnLoader, batches: Any) -> AbstractContextManager[Iterator[Any]]:
        return loading.read_batches(source, batches, self._contexts[0])

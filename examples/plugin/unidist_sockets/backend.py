"""The contract of `unidist.backend`, kept with tiny's models and a `Wire`."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np

from unidist.plugin import (
    Backend,
    OptimizerSpec,
    StateError,
    UsageError,
    check_own_parameters,
    check_range,
    check_tied,
    expect,
)
from unidist_sockets import plugin, tiny
from unidist_sockets.wire import Wire

REDUCE = {"sum": np.sum, "min": np.min, "max": np.max}


@dataclass
class Group:
    """The micro-batches of one update of a model, as far as they have come."""

    trained: dict[str, tiny.Parameter]  # as `prepare` found them
    left: dict[tiny.Parameter, np.ndarray] = field(default_factory=dict)  # copies of the gradients as we left them
    weight: float = 0.0

    def put(self, gradients) -> None:
        for parameter, gradient in zip(self.trained.values(), gradients, strict=True):
            parameter.grad = np.asarray(gradient, parameter.dtype)
            self.left[parameter] = parameter.grad.copy()

    @property
    def changed(self) -> bool:
        """A call of the user's own has touched the gradients."""
        return any(not np.array_equal(parameter.grad, left, equal_nan=True) for parameter, left in self.left.items())

    def clear(self) -> None:
        self.left, self.weight = {}, 0.0
        for parameter in self.trained.values():
            parameter.grad = None


def refuse_step() -> None:
    raise StateError(
        "optimizer.step() would part the ranks: leave it out, strategy.step or train_step makes the update"
    )


class SocketsBackend(Backend):
    framework, device, version, capabilities = "tiny", "cpu", np.__version__, plugin.capabilities
    transport = "sockets (through rank 0)"

    def __init__(self, world, options, device, timeout) -> None:
        if device not in (None, "cpu"):
            raise UsageError(f"device is {device!r}: NumPy computes on the CPU, and uses no GPU")
        self.world, self.options = world, options
        self._wire = Wire(world, options.nodelay, timeout)
        self._groups: WeakKeyDictionary[tiny.Module, Group] = WeakKeyDictionary()

    def close(self, failed) -> None:
        if not failed:
            self.barrier()
        self._wire.close()

    # -- tensors and collectives

    def is_tensor(self, value) -> bool:
        return isinstance(value, (tiny.Tensor, tiny.Node))

    def to_numpy(self, tensor) -> np.ndarray:
        return np.array(tensor.data if isinstance(tensor, tiny.Node) else tensor)

    def from_numpy(self, array):
        return tiny.tensor(array)

    def all_gather(self, tensor):
        mine = self.to_numpy(tensor)
        parts = self._wire.all_gather(mine.tobytes()) if mine.size else [b""] * self.world.world_size
        return [tiny.tensor(np.frombuffer(bytearray(part), mine.dtype).reshape(mine.shape)) for part in parts]

    def all_reduce(self, tensor, op):
        everybody = np.stack(self.all_gather(tensor))
        dtype = None if everybody.dtype.kind == "b" else everybody.dtype  # a sum of flags is a count
        return tiny.tensor(np.asarray(REDUCE[op](everybody, axis=0), dtype))

    def broadcast(self, tensor, source):
        return self.all_gather(tensor)[source]

    def barrier(self) -> None:
        self._wire.all_gather(b"here")

    def _mean(self, arrays) -> list[np.ndarray]:
        """The mean of each array over the ranks, in one exchange."""
        flat = np.concatenate([np.ravel(array) for array in arrays])
        mean = np.asarray(self.all_reduce(tiny.tensor(flat), "sum")) / self.world.world_size
        parts = np.split(mean, np.cumsum([np.size(array) for array in arrays])[:-1])
        return [part.reshape(np.shape(array)) for part, array in zip(parts, arrays, strict=True)]

    # -- models

    def _named(self, model) -> dict[str, tiny.Parameter]:
        if not isinstance(model, tiny.Module):
            raise UsageError(f"the model is a {type(model).__name__}, it must be a unidist_sockets.tiny.Module")
        return {
            prefix + name: parameter
            for prefix, module in model.modules()
            for name, parameter in module.parameters.items()
        }

    def check_prepare(self, model, optimizer) -> None:
        named = self._named(model)
        native = optimizer is not None and not isinstance(optimizer, OptimizerSpec)
        if native and not isinstance(optimizer, tiny.Optimizer):
            raise UsageError(f"the optimizer is a {type(optimizer).__name__}, it must be a tiny.Optimizer")
        if native:
            check_own_parameters(optimizer.parameters, named.values())

    def prepare(self, model, optimizer, features):
        self.load_state(model, {name: self.broadcast(tensor, 0) for name, tensor in self.state(model).items()})
        trained = {name: parameter for name, parameter in self._named(model).items() if parameter.trained}
        if isinstance(optimizer, OptimizerSpec):
            settings = {**vars(optimizer), "lr": optimizer.rate(0)}
            optimizer = tiny.Optimizer(trained.values(), type(optimizer).__name__, **settings)
            optimizer.from_spec = True
        if optimizer is not None:
            optimizer.step = refuse_step
            self._groups[model] = Group(trained)
        return model, optimizer

    def unwrap(self, model):
        return model

    def state(self, model):
        self._named(model)
        parts = {}
        for prefix, module in model.modules():
            parts |= {prefix + name: tiny.tensor(parameter.data) for name, parameter in module.parameters.items()}
            parts |= {prefix + name: buffer for name, buffer in module.buffers.items()}
        return parts

    def parameters(self, model):
        named = self._named(model)
        return {name: tiny.tensor(parameter.data) for name, parameter in named.items() if parameter.trained}

    def check_state(self, model, arrays, filled) -> None:
        check_tied(arrays, {**arrays, **self._named(model)})

    def load_state(self, model, arrays) -> None:
        for name, tensor in self.state(model).items():  # views of what the model holds
            tensor[...] = arrays[name]

    def settings(self, optimizer):
        return optimizer.settings

    def optimizer_state(self, model, optimizer):
        named = self._named(model)
        held = {name: optimizer.slots[parameter] for name, parameter in named.items() if parameter in optimizer.slots}
        arrays = {f"{name}/{slot}": tiny.tensor(array) for name, slots in held.items() for slot, array in slots.items()}
        if optimizer.kind != "SGD":
            arrays |= {f"{name}/step": tiny.tensor(np.float32(optimizer.updates)) for name in held}
        return arrays, {"kind": optimizer.kind, "groups": [dict(optimizer.settings)]}

    def load_optimizer_state(self, model, optimizer, arrays, values):
        named = {name: parameter for name, parameter in self._named(model).items() if parameter in optimizer.slots}
        (saved,) = expect.optimizer(values, optimizer.kind, 1)
        settings = expect.settings("the optimizer's group 0", saved, optimizer.settings)
        slots = expect.slots(arrays, {name: parameter.shape for name, parameter in named.items()}, optimizer.kind)
        counts = [expect.count(f"{name}/step", kept["step"]) for name, kept in slots.items() if "step" in kept]
        for name, kept in slots.items():
            for slot, array in kept.items():
                check_range(f"the optimizer's {name}/{slot}", array, named[name].dtype)

        def put() -> None:
            if not hasattr(optimizer, "from_spec"):  # else the user's code holds them
                optimizer.settings |= settings
            optimizer.updates = max(counts, default=0)
            for name, parameter in named.items():
                for slot, array in optimizer.slots[parameter].items():
                    array[...] = slots.get(name, {}).get(slot, 0.0)

        return put

    def rng_state(self):
        _, words, position, *_ = tiny.generator.get_state()
        return {"tiny": np.append(words, np.uint32(position))}

    def load_rng_state(self, arrays):
        words = expect.array("the generator state 'tiny'", arrays.get("tiny"), np.uint32, (625,))
        expect.whole("the place in the generator state 'tiny'", int(words[624]), 0, 624)
        return lambda: tiny.generator.set_state(("MT19937", words[:624], int(words[624])))

    def average(self, model, what) -> None:
        trained = [parameter for parameter in self._named(model).values() if parameter.trained]
        if what == "parameters":
            for parameter, mean in zip(trained, self._mean([parameter.data for parameter in trained]), strict=True):
                parameter.data[...] = mean
        else:
            gradients = [np.zeros_like(p.data) if p.grad is None else p.grad for p in trained]
            self._groups[model].put(self._mean(gradients))

    def evens_out(self, model) -> bool:
        return any(module.buffers for _, module in model.modules())

    @contextmanager
    def evaluate(self, model):
        modes = [(module, module.training) for _, module in model.modules()]
        for module, _ in modes:  # running statistics differ between ranks; evaluation must not
            module.buffers = {name: self.broadcast(buffer, 0) for name, buffer in module.buffers.items()}
            module.training = False
        before, tiny.recording = tiny.recording, False
        try:
            yield
        finally:
            tiny.recording = before
            for module, training in modes:
                module.training = training

    # -- a training step

    def on_inputs(self, model, listener) -> None:
        model.listeners.append(listener)

    def forward(self, model, micro):
        return nullcontext()

    def backward(self, model, loss, micro) -> None:
        group = self._groups[model]
        self._refuse_if(model, group.left and group.changed, "the gradients were changed in the middle of a group")
        now = {name for name, parameter in self._named(model).items() if parameter.trained}
        self._refuse_if(model, now != group.trained.keys(), "parameters were frozen or unfrozen after prepare()")
        if not isinstance(loss, tiny.Node):
            raise UsageError("the loss has no gradient: compute it from the model's parameters, and do not detach it")
        found = tiny.gradients(loss) if micro.weight else {}  # 0 times a loss that is no number would not be 0
        group.put(
            group.left.get(parameter, 0) + micro.weight * found.get(parameter, 0 * parameter.data)
            for parameter in group.trained.values()
        )
        group.weight += micro.weight
        if micro.sync:
            *gradients, weight = self._mean([*group.left.values(), np.float32(group.weight)])
            group.weight = float(weight)
            # Divided at once, so that what is done to gradients before the update is done to what will be applied.
            group.put(gradients if micro.summed else [gradient / (group.weight or 1.0) for gradient in gradients])

    def apply(self, model, optimizer, update):
        group, scale = self._groups[model], 1.0 if update.rescale is None else update.rescale
        gone = any(parameter.grad is None for parameter in optimizer.parameters)
        self._refuse_if(model, gone, "the gradients were cleared between backward and step")
        self._refuse_if(model, scale != 1.0 and group.changed, "the gradients were changed before they were scaled")
        if update.clip_norm is not None:
            norm = scale * np.sqrt(sum((parameter.grad**2).sum() for parameter in optimizer.parameters))
            scale *= min(1.0, update.clip_norm / (norm + 1e-6))
        for parameter in optimizer.parameters:
            parameter.grad = parameter.grad * np.float32(scale)
        if update.lr is not None:
            optimizer.settings["lr"] = update.lr
        type(optimizer).step(optimizer)
        mean_weight = group.weight if update.rescale is None else 1.0
        group.clear()
        return mean_weight

    def _refuse_if(self, model, wrong, why) -> None:
        if wrong:
            self._groups[model].clear()  # this group is lost; the next one begins without its gradients
            raise StateError(f"{why}: leave that to unidist, or do it before a group of micro-batches begins")

    def clear_gradients(self, model) -> None:
        self._groups[model].clear()

    def keep_gradients(self, model, other):
        if set(self._groups[model].trained.values()) & set(self._named(other).values()):
            raise StateError(
                "two prepared models share parameters, and one is in the middle of a group: finish it first"
            )
        return nullcontext()  # `backward` touches the gradients of its own model only

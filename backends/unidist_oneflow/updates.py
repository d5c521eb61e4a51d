"""An update as a part of an nn.Graph, by the kernels of OneFlow's optimizers.

`Graph.add_optimizer` would compile the rate into the graph and keep the optimizer's state in there. Here they are
variables that share their memory with what the optimizer holds: the next update may be an eager one, with another
rate, and a checkpoint finds everything where it always is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import cycle, islice
from typing import Any, NamedTuple

import oneflow as flow

from unidist_oneflow.variables import Faces

Tensor = Any

AT_ONCE = 8  # parameters whose state is looked at in a step: its cost must not grow with their number


class Kernel(NamedTuple):
    operation: Any
    run: Any
    numbers: tuple[str, ...]  # its inputs that are settings of a parameter group
    state: tuple[str, ...]  # those that the optimizer holds for each parameter


def _kernel(name: str, numbers: Mapping[str, str], state: Mapping[str, str]) -> Kernel:
    """Inputs of an operation, and what OneFlow's optimizers call them."""
    builder = flow.stateful_op(name).Input("model").Input("model_diff")
    for input_name in (*numbers, *state):
        builder = builder.Input(input_name)
    run = getattr(flow._C, f"dispatch_{name}")
    return Kernel(builder.Build(), run, tuple(numbers.values()), tuple(state.values()))


RATE = {"learning_rate": "lr"}
CORRECTIONS = {"bias_correction1": "bias_correction1", "bias_correction2": "bias_correction2"}
PLAIN = _kernel("sgd_update", RATE, {})
MOMENTUM = _kernel("momentum_update", RATE, {"momentum": "momentum_buf"})
ADAM = _kernel("adam_update", RATE | CORRECTIONS, {"m": "exp_avg", "v": "exp_avg_sq"})


class GraphUpdate:
    """Of one prepared model, whatever graphs it has."""

    def __init__(self, optimizer: Any, faces: Faces) -> None:
        self._optimizer, self._twins, self._variables = optimizer, faces.twins, faces.variables
        self._adam = not isinstance(optimizer, flow.optim.SGD)
        self._step = optimizer.step
        self._shared: dict[str, Tensor] = {}  # local tensors of the optimizer's state, by name of the variable
        self._sharing: list[tuple[str, ...]] = []  # what kernels need of it, for each group
        self._in_turn: Iterator[tuple[Tensor, str, Tensor]] = iter(())  # parameter, key of its state, what is shared

    @property
    def possible(self) -> bool:
        """As things are now. A subclass, or a `step` that was replaced, may do something else."""
        known = type(self._optimizer) in (flow.optim.SGD, flow.optim.Adam, flow.optim.AdamW)
        groups = [group.options for group in self._optimizer.param_groups]
        odd = any(group.get("amsgrad") or group.get("fused") for group in groups)
        return known and not odd and self._optimizer.step == self._step

    @property
    def compiled_in(self) -> str:
        """The settings for which a graph is compiled."""
        changing = (*ADAM.numbers, "initial_lr")
        return str([[(k, v) for k, v in g.options.items() if k not in changing] for g in self._optimizer.param_groups])

    def begin(self) -> None:
        """Before the graph is compiled or run: give its variables what the optimizer holds now."""
        state = self._optimizer._state
        for n, group in enumerate(self._optimizer.param_groups):
            if self._adam and group["do_bias_correction"]:
                for name, beta in zip(CORRECTIONS, group["betas"], strict=True):
                    group[name] = 1.0 - beta ** (state["step"] + 1)
            kernel = self._kernel(group)
            for name in kernel.numbers:
                self._variables.set(f"{name}{n}", group[name])
        sharing = [self._kernel(group).state for group in self._optimizer.param_groups]
        # Who replaces the state of one parameter does so for all of them; to look at all in each step would take long.
        some = islice(self._in_turn, AT_ONCE)
        if sharing != self._sharing or any(state[parameter].get(key) is not shared for parameter, key, shared in some):
            self._sharing = sharing
            self._in_turn = cycle(list(self._share_all()))

    def _share_all(self) -> Iterator[tuple[Tensor, str, Tensor]]:
        for n, (group, keys) in enumerate(zip(self._optimizer.param_groups, self._sharing, strict=True)):
            for m, parameter in enumerate(group.parameters):
                for key in keys if parameter.requires_grad else ():
                    yield parameter, key, self._share(f"{key}{n}_{m}", parameter, key)

    def _share(self, name: str, parameter: Tensor, key: str) -> Tensor:
        state = self._optimizer._state[parameter]
        if name not in self._shared:
            if key not in state:
                state[key] = flow.zeros_like(parameter)
            self._variables.share(name, state[key])
            self._shared[name] = state[key]
        shared = self._shared[name]
        if state.get(key) is not shared:  # a checkpoint was loaded
            shared.copy_(state[key]) if key in state else shared.zero_()
            state[key] = shared
        return shared

    def trace(self, variables: Any, gradients: Mapping[Tensor, Tensor]) -> None:
        """Inside a graph: `gradients` by local parameter, `variables` as the graph shows them."""
        for n, group in enumerate(self._optimizer.param_groups):
            kernel, settings = self._kernel(group), self._settings(group)
            numbers = [getattr(variables, f"{name}{n}") for name in kernel.numbers]
            for m, parameter in enumerate(group.parameters):
                if parameter.requires_grad:
                    state = [getattr(variables, f"{key}{n}_{m}") for key in kernel.state]
                    inputs = (self._twins[parameter], gradients[parameter], *numbers, *state)
                    kernel.run(kernel.operation, inputs, learning_rate=0.0, **settings)

    def end(self) -> None:
        self._optimizer._state["step"] += 1

    def _kernel(self, group: Any) -> Kernel:
        if self._adam:
            return ADAM
        return MOMENTUM if group["momentum"] else PLAIN

    def _settings(self, group: Any) -> dict[str, Any]:
        """As the optimizers themselves hand them to the kernels."""
        if self._adam:
            decay = "weight_decay" if isinstance(self._optimizer, flow.optim.AdamW) else "l2"
            beta1, beta2 = group["betas"]
            rest = {"epsilon": group["eps"], "do_bias_correction": group["do_bias_correction"], "amsgrad": False}
            return {decay: group["weight_decay"], "beta1": beta1, "beta2": beta2, **rest}
        if not group["momentum"]:
            return {"l2": group["weight_decay"]}
        names = ("dampening", "nesterov", "maximize")
        return {"l2": group["weight_decay"], "beta": group["momentum"], **{name: group[name] for name in names}}

"""DistributedDataParallel's exchange of gradients, around the loss instead of around the model.

DDP only needs to know when a backward pass is about to begin. Told so with the loss, it does not matter how the loss
was computed: through the model, one of its methods, or a submodule. So users keep the model that they made.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from unidist.plugin import Features, MicroBatch, StateError
from unidist_torch import TorchOptions, compression


class Reducer:
    def __init__(self, model: nn.Module, device: torch.device, options: TorchOptions, features: Features) -> None:
        self._carrier = _Carrier(model, device, compressed=features.compression is not None)
        self._ddp = DistributedDataParallel(
            self._carrier,
            device_ids=[device.index] if device.type == "cuda" else None,
            bucket_cap_mb=options.bucket_cap_mb,
            find_unused_parameters=options.find_unused_parameters,
            static_graph=options.static_graph,
            gradient_as_bucket_view=True,
        )
        if features.compression is not None:
            compression.register(self._ddp, features.compression, self._carrier.weights)
        self._trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._all_used = not (options.find_unused_parameters or options.static_graph)

    def backward(self, loss: torch.Tensor, micro: MicroBatch) -> None:
        """`loss` is weighted already. The weights add up in the gradient of a parameter that nothing else uses, and
        travel in a bucket with the others: an all-reduce of their own would cost a tenth of a small step."""
        must_use = self._trained if micro.sync and self._all_used else {}
        before = [variable.grad for variable in must_use.values()]
        with nullcontext() if micro.sync else self._ddp.no_sync():
            self._ddp(loss + self._carrier.weights[0] * micro.weight).backward()
        for (name, parameter), then in zip(must_use.items(), before, strict=True):
            # DDP puts the gradient of every parameter that a backward reaches into its buckets. A bucket that misses
            # one is not exchanged, which DDP would say in the next step, after an update with what there is.
            if parameter.grad is then:
                raise StateError(
                    f"the loss does not use parameter {name}, or it was frozen after prepare(), so its gradients could "
                    "not be exchanged: set the option find_unused_parameters=True, or freeze it, by "
                    "requires_grad_(False), before prepare(). To go on with this model, prepare it again"
                )

    def take_mean_weight(self) -> float | torch.Tensor:
        """The mean over ranks of what a group weighs, since the last call."""
        mean, self._carrier.weights.grad = self._carrier.weights.grad, None
        if mean is None:
            return 1.0
        if mean.device.type != "cpu":
            return mean  # to read it would wait for the device
        value = float(mean)
        return 1.0 if abs(value - 1.0) < 1e-6 else value  # a third and a third and a third

    def clear(self) -> None:
        self._carrier.weights.grad = None


class _Carrier(nn.Module):  # type: ignore[misc]  # torch is not there to be checked
    """Holds the model's parameters, not the model, which must not live as long as DDP does; and not its buffers, which
    DDP would broadcast here, between forward and backward, which both use them."""

    def __init__(self, model: nn.Module, device: torch.device, compressed: bool) -> None:
        super().__init__()
        trained = [parameter.dtype for parameter in model.parameters() if parameter.requires_grad]
        # A bucket holds one dtype: that of others where it is exact, and none of theirs where they are compressed.
        exact = [torch.float64, torch.float32]
        fitting = [bucket for bucket in exact if (bucket in trained) is not compressed] or exact
        for name, parameter in model.named_parameters():
            self.register_parameter(f"model/{name.replace('.', '/')}", parameter)  # no name of ours can be like it
        # DDP fills its buckets in the reverse order, and the gradient of this one is ready first.
        self.weights = nn.Parameter(torch.zeros(1, dtype=fitting[0], device=device))

    def forward(self, loss: torch.Tensor) -> torch.Tensor:
        return loss

"""OneFlow's tensors, and collectives on them."""

from __future__ import annotations

from typing import Any

import numpy as np
import oneflow as flow

from unidist.plugin import Backend, Reduction, UnsupportedOperation, UsageError, World


class OneFlowTensors(Backend):
    """The part of the contract that knows no models."""

    framework = "oneflow"

    def __init__(self, world: World, device: str) -> None:
        self.world, self.device, self.version = world, device, flow.__version__
        kind = "cpu" if device == "cpu" else "cuda"
        self._placement = flow.placement(kind, ranks=list(range(world.world_size)))

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

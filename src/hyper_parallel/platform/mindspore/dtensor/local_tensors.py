"""Local operations of redistribution on MindSpore's tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import mindspore
from mindspore import Tensor, mint, ops
from mindspore.common import dtype as mstype

from hyper_parallel.platform.mindspore.communication import host
from hyper_parallel.platform.mindspore.tensors import filled

__all__ = ["MindSporeTensors", "box_of_tensor"]

_REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda left, right: left + right,
    "max": ops.maximum,
    "min": ops.minimum,
    "prod": lambda left, right: left * right,
}


def box_of_tensor(tensor: Tensor, starts: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Return a view of a box. It is made by `narrow`, whose gradient the CPU has for every dtype, also of nothing."""
    for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = mint.narrow(tensor, dim, start, size)
    return tensor


class MindSporeTensors:
    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.itemsize = like.itemsize

    def slice(self, tensor: Tensor, starts: Sequence[int], sizes: Sequence[int]) -> Tensor:
        return box_of_tensor(tensor, starts, sizes)

    def place(
        self, shape: Sequence[int], pieces: Sequence[tuple[Sequence[int], Tensor]], like: Tensor, fill: int | None
    ) -> Tensor:
        size = tuple(shape)
        if fill is None:
            made = mint.empty(size, dtype=like.dtype)
        else:
            made = filled(size, fill, like.dtype, None, "redistribute")
        if not math.prod(size):
            return made
        # Written by index: the CPU writes through no other view. bfloat16 has no such kernel and goes as its bits.
        target = made.view(mindspore.int16) if like.dtype == mindspore.bfloat16 else made
        for starts, piece in pieces:
            if not piece.numel():
                continue
            whole = host.copied(piece)
            values = whole.view(mindspore.int16) if like.dtype == mindspore.bfloat16 else whole
            if not size:
                return values
            target[tuple(slice(start, start + n) for start, n in zip(starts, piece.shape, strict=True))] = values
        return made

    def reduce_local(self, tensors: Sequence[Tensor], op: str) -> Tensor:
        result = tensors[0]
        if not result.numel():
            return result
        for tensor in tensors[1:]:
            result = _REDUCTIONS[op](result, tensor)
        return result

    def divide(self, tensor: Tensor, divisor: int) -> Tensor:
        if not tensor.numel():
            return tensor
        if tensor.dtype in mstype.float_type:
            # Made a tensor first: MindSpore rounds a number to float32 before it meets a float64 tensor.
            return tensor / Tensor(divisor, tensor.dtype)
        return (tensor / divisor).to(tensor.dtype)

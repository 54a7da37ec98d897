"""Local operations of redistribution on PyTorch's tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

__all__ = ["TorchTensors"]

_REDUCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "prod": torch.mul,
}


class TorchTensors:
    def __init__(self, like: torch.Tensor) -> None:
        self.like = like
        self.itemsize = like.element_size()

    def slice(self, tensor: torch.Tensor, starts: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        return tensor[tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))]

    def place(
        self,
        shape: Sequence[int],
        pieces: Sequence[tuple[Sequence[int], torch.Tensor]],
        like: torch.Tensor,
        fill: int | None,
    ) -> torch.Tensor:
        made = like.new_empty(tuple(shape)) if fill is None else like.new_full(tuple(shape), fill)
        for starts, piece in pieces:
            self.slice(made, starts, piece.shape).copy_(piece)
        return made

    def reduce_local(self, tensors: Sequence[torch.Tensor], op: str) -> torch.Tensor:
        result = tensors[0]
        for tensor in tensors[1:]:
            result = _REDUCTIONS[op](result, tensor)
        return result

    def divide(self, tensor: torch.Tensor, divisor: int) -> torch.Tensor:
        return (tensor / divisor).to(tensor.dtype)

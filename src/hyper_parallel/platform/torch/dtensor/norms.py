"""Norms of tensors that lie differently: each element counts once, wherever it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.shard.communication_log import why
from hyper_parallel.platform.torch.dtensor.conversion import from_torch
from hyper_parallel.platform.torch.dtensor.movement import reduce_values
from hyper_parallel.platform.torch.dtensor.tensor import DTensor

__all__ = ["has_distributed", "local_part", "total_norm"]

Place = tuple["DeviceMesh | None", tuple[str, ...]]  # the axes over which parts are to be combined


def has_distributed(tensors: Sequence[torch.Tensor]) -> bool:
    """Say whether one is a DTensor, of this package or PyTorch's own."""
    return any(isinstance(tensor, DTensor) or _is_native(tensor) for tensor in tensors)


def _is_native(tensor: torch.Tensor) -> bool:
    # PyTorch's DTensors are known by an attribute that they alone have beside ours.
    return hasattr(tensor, "_local_tensor") and not isinstance(tensor, DTensor)


def _as_ours(tensor: object) -> Any:
    if not _is_native(tensor):
        return tensor

    return from_torch(tensor)


def local_part(tensor: Any) -> torch.Tensor:
    """Return the memory of a gradient on this rank."""
    part: torch.Tensor = tensor._local_tensor if has_distributed([tensor]) else tensor
    return part


@torch.no_grad()
def total_norm(tensors: Sequence[Any], norm_type: float) -> torch.Tensor:
    """Compute the p-norm of all elements of all tensors, equal on all ranks.

    It takes one collective per mesh and set of axes.
    """
    is_max = math.isinf(norm_type)
    parts: dict[Place, list[torch.Tensor]] = {}
    device = local_part(tensors[0]).device
    for tensor in map(_as_ours, tensors):
        if isinstance(tensor, DTensor):
            whole = tensor.reduce_partial()  # a partial sum has no norm of its own
            layout = whole._spec.layout
            place: Place = (layout.mesh, layout.varying_axes)
            local = whole._local_tensor
        else:
            place, local = (None, ()), tensor
        parts.setdefault(place, []).append(_power(local, norm_type).to(device))
    combined = []
    for (mesh, axes), powers in parts.items():
        value = torch.stack(powers)
        value = value.amax(0) if is_max else value.sum(0)
        if mesh is not None and axes:
            with why("asked", "clip_grad_norm_"):
                value = reduce_values(value, mesh, axes, "max" if is_max else "sum")
        combined.append(value)
    total = torch.stack(combined)
    return total.amax(0) if is_max else total.sum(0) ** (1.0 / norm_type)


def _power(local: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Return what is added up over parts: the p-th power of the norm; for the maximum the largest."""
    wide = local if local.dtype in (torch.float32, torch.float64) else local.float()
    if math.isinf(norm_type):
        return wide.abs().amax() if wide.numel() else wide.new_zeros(())
    return wide.abs().pow(norm_type).sum() if norm_type != 2.0 else wide.square().sum()

"""Norms of tensors that lie differently: each element counts once, wherever it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.shard.communication_log import why
from hyper_parallel.platform.torch.dtensor.conversion import from_torch, mesh_from_torch
from hyper_parallel.platform.torch.dtensor.movement import reduce_values
from hyper_parallel.platform.torch.dtensor.tensor import DTensor

__all__ = ["has_distributed", "local_part", "total_gradient_norm", "total_norm"]

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


def total_norm(tensors: Sequence[Any], norm_type: float) -> torch.Tensor:
    """Compute the p-norm of all elements of all tensors, equal on all ranks.

    It takes one collective per mesh and set of axes.
    """
    return _total([(tensor, tensor) for tensor in tensors], norm_type)


def total_gradient_norm(parameters: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Compute the p-norm of all gradients of parameters, equal on all ranks.

    One that is not there counts as zeros: ranks communicate by the parameters, so that none waits for another that has
    no gradient for one of them.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad or parameter.grad is not None]
    return _total([(parameter, parameter.grad) for parameter in trained], norm_type)


@torch.no_grad()
def _total(pairs: Sequence[tuple[Any, Any]], norm_type: float) -> torch.Tensor:
    """Compute the norm of the second ones. Where one is None, the first one says where it would be."""
    if not pairs:
        return torch.tensor(0.0)
    is_max = math.isinf(norm_type)
    parts: dict[Place, list[torch.Tensor]] = {}
    device = local_part(pairs[0][0]).device
    for like, tensor in pairs:
        place, local = _placed(like if tensor is None else tensor)
        part = _power(local[:0] if local.ndim else local.new_zeros((0,)), norm_type) if tensor is None else None
        parts.setdefault(place, []).append((_power(local, norm_type) if part is None else part).to(device))
    combined = []
    for (mesh, axes), powers in parts.items():
        value = torch.stack(powers)
        value = value.amax(0) if is_max else value.sum(0)
        if mesh is not None and axes:
            with why("asked", "clip_grad_norm_"):
                value = _largest(value, mesh, axes) if is_max else reduce_values(value, mesh, axes, "sum")
        combined.append(value)
    total = torch.stack(combined)
    return total.amax(0) if is_max else total.sum(0) ** (1.0 / norm_type)


def _placed(tensor: Any) -> tuple[Place, torch.Tensor]:
    """Say over which axes the parts of a tensor lie, and give the one that is here."""
    if _is_native(tensor) and not any(placement.is_partial() for placement in tensor.placements):
        # Also where PyTorch has split one dim over two axes in an order that placements cannot say.
        mesh = mesh_from_torch(tensor.device_mesh)
        pairs = zip(mesh.axis_names, tensor.placements, strict=True)
        return (mesh, tuple(axis for axis, placement in pairs if not placement.is_replicate())), tensor._local_tensor
    tensor = _as_ours(tensor)
    if not isinstance(tensor, DTensor):
        return (None, ()), tensor
    whole = tensor.reduce_partial()  # a partial sum has no norm of its own
    layout = whole._spec.layout
    return (layout.mesh, layout.varying_axes), whole._local_tensor


def _largest(value: torch.Tensor, mesh: DeviceMesh, axes: tuple[str, ...]) -> torch.Tensor:
    """Find the largest over ranks; NaN if a rank has NaN, which a collective may pass over."""
    is_nan = torch.isnan(value)
    both = torch.stack([value.masked_fill(is_nan, 0.0), is_nan.to(value.dtype)])
    both = reduce_values(both, mesh, axes, "max")
    return both[0].masked_fill(both[1] > 0, math.nan)


def _power(local: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Return what is added up over parts: the p-th power of the norm; for the maximum the largest."""
    wide = local if local.dtype in (torch.float32, torch.float64) else local.float()
    if math.isinf(norm_type):
        return wide.abs().amax() if wide.numel() else wide.new_zeros(())
    return wide.abs().pow(norm_type).sum() if norm_type != 2.0 else wide.square().sum()

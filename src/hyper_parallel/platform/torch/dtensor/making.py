"""DTensors from whole tensors; the local parts of those that are made from nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import tensor as native

from hyper_parallel._base.errors import ArgumentTypeError, describe
from hyper_parallel.core.dtensor.boxes import Box
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.dtensor.placements import Placement
from hyper_parallel.core.shard.local_parts import as_layout
from hyper_parallel.core.shard.spec import Spec
from hyper_parallel.platform.torch.dtensor.conversion import from_torch
from hyper_parallel.platform.torch.dtensor.tensor import DTensor, wrapped

__all__ = ["distribute_tensor", "drawn", "filled"]

_MOST_DRAWN_AT_ONCE = 2**26  # elements; what is drawn at once must not depend on the mesh


def distribute_tensor(
    tensor: torch.Tensor, mesh: DeviceMesh | Layout, placements: Sequence[Placement] | Layout | None = None
) -> DTensor:
    """Return the part of a whole tensor that belongs to this rank.

    Every rank has the tensor; nothing is communicated, and gradients flow to it.

    Raises:
        ValueError: a placement does not fit.
        RuntimeError: the mesh has ranks that were not started.
    """
    if isinstance(tensor, DTensor):
        return tensor.redistribute(mesh, placements)
    if isinstance(tensor, native.DTensor):
        return from_torch(tensor).redistribute(mesh, placements)
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentTypeError("Only a tensor can be distributed.", expected="a torch.Tensor", got=describe(tensor))
    layout = mesh if isinstance(mesh, Layout) else as_layout(mesh, placements, tensor.ndim)
    layout.mesh.check_started()
    whole = Layout(layout.mesh, ((),) * tensor.ndim)
    spec = Spec(whole, tuple(tensor.shape))
    if isinstance(tensor, torch.nn.Parameter):
        # Optimizers step on leaves, and so the part of a parameter is one, with memory of its own.
        part = wrapped(tensor.detach(), spec).redistribute(layout)
        made: Any = torch.nn.Parameter(wrapped(part._local.clone(), part._spec), tensor.requires_grad)
        return made
    # Detached where no gradient flows: `requires_grad_` of the result must not reach the tensor that was given.
    return wrapped(tensor if tensor.requires_grad else tensor.detach(), spec).redistribute(layout)


def filled(shape: Sequence[int], value: object, dtype: object, device: object, mesh: DeviceMesh) -> torch.Tensor:
    """Make a local tensor of one value; None: of whatever is in memory."""
    device = device or mesh.device_type
    if value is None:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    return torch.full(tuple(shape), value, dtype=dtype, device=device)


def drawn(kind: str, spec: Spec, box: Box, dtype: object, device: object) -> torch.Tensor:
    """Draw random numbers over the whole tensor, and keep this rank's part."""
    draw = {"rand": torch.rand, "randn": torch.randn}[kind]
    device = device or spec.layout.mesh.device_type
    row = math.prod(spec.shape[1:])
    step = max(1, _MOST_DRAWN_AT_ONCE // max(row, 1))
    if not spec.shape or spec.num_elements <= _MOST_DRAWN_AT_ONCE:
        local = draw(spec.shape, dtype=dtype, device=device)[_slices(box.starts, box.sizes)].clone()
    else:
        local = torch.empty(box.sizes, dtype=dtype, device=device)
        for begin in range(0, spec.shape[0], step):
            slab = draw((min(step, spec.shape[0] - begin), *spec.shape[1:]), dtype=dtype, device=device)
            first, last = max(begin, box.starts[0]), min(begin + slab.shape[0], box.starts[0] + box.sizes[0])
            if first < last:
                part = slab[_slices((first - begin, *box.starts[1:]), (last - first, *box.sizes[1:]))]
                local[first - box.starts[0] : last - box.starts[0]] = part
    return local


def _slices(starts: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))

"""DTensors from whole tensors, from parts, and from nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hyper_parallel._base.errors import ArgumentTypeError, describe
from hyper_parallel.core.dtensor.boxes import box_of
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.dtensor.placements import Placement
from hyper_parallel.core.shard.local_parts import as_layout
from hyper_parallel.core.shard.spec import Spec
from hyper_parallel.platform.torch.dtensor.movement import coordinate_on
from hyper_parallel.platform.torch.dtensor.tensor import DTensor, wrapped

__all__ = ["distribute_tensor", "empty", "full", "ones", "rand", "randn", "zeros"]

_MOST_DRAWN_AT_ONCE = 2**26  # elements; what is drawn at once must not depend on the mesh


def distribute_tensor(
    tensor: torch.Tensor, mesh: DeviceMesh | Layout, placements: Sequence[Placement] | Layout | None = None
) -> DTensor:
    """The part of a whole tensor that belongs to this rank. Every rank has the tensor; nothing is communicated, and gradients flow to it.

    Raises:
        ValueError: a placement does not fit.
    """
    if isinstance(tensor, DTensor):
        return tensor.redistribute(mesh, placements)
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentTypeError("Only a tensor can be distributed.", expected="a torch.Tensor", got=describe(tensor))
    layout = mesh if isinstance(mesh, Layout) else as_layout(mesh, placements, tensor.ndim)
    whole = Layout(layout.mesh, ((),) * tensor.ndim)
    spec = Spec(whole, tuple(tensor.shape))
    if isinstance(tensor, torch.nn.Parameter):
        # A parameter's part is a leaf of its own.
        part = wrapped(tensor.detach(), spec).redistribute(layout)
        made: Any = torch.nn.Parameter(wrapped(part._local.clone(), part._spec), tensor.requires_grad)
        return made
    # A tensor of its own where no gradient flows: `requires_grad_` of the result must not reach the one that was given.
    return wrapped(tensor if tensor.requires_grad else tensor.detach(), spec).redistribute(layout)


def _filled(
    make: Callable[..., torch.Tensor],
    size: Sequence[int],
    mesh: Any,
    placements: Any,
    dtype: Any,
    device: Any,
    requires_grad: bool,
) -> DTensor:
    layout = mesh if isinstance(mesh, Layout) else as_layout(mesh, placements, len(size))
    spec = Spec(layout.without_partial(), tuple(size))
    local = make(spec.local_shape_at(coordinate_on(layout)), dtype=dtype, device=device or layout.mesh.device_type)
    made = wrapped(local, spec) if not layout.partial else wrapped(local, spec).redistribute(layout)
    return made.requires_grad_(requires_grad)


def ones(
    size: Sequence[int], mesh: Any, placements: Any = None, *, dtype: Any = None, device: Any = None, requires_grad: bool = False
) -> DTensor:  # fmt: skip
    """A DTensor of ones; `size` is the global shape."""
    return _filled(torch.ones, size, mesh, placements, dtype, device, requires_grad)


def zeros(
    size: Sequence[int], mesh: Any, placements: Any = None, *, dtype: Any = None, device: Any = None, requires_grad: bool = False
) -> DTensor:  # fmt: skip
    """A DTensor of zeros; `size` is the global shape."""
    return _filled(torch.zeros, size, mesh, placements, dtype, device, requires_grad)


def empty(
    size: Sequence[int], mesh: Any, placements: Any = None, *, dtype: Any = None, device: Any = None, requires_grad: bool = False
) -> DTensor:  # fmt: skip
    """A DTensor of whatever is in memory; `size` is the global shape."""
    return _filled(torch.empty, size, mesh, placements, dtype, device, requires_grad)


def full(
    size: Sequence[int],
    fill_value: Any,
    mesh: Any,
    placements: Any = None,
    *,
    dtype: Any = None,
    device: Any = None,
    requires_grad: bool = False,
) -> DTensor:
    """A DTensor of one value; `size` is the global shape."""

    def make(shape: Sequence[int], **options: Any) -> torch.Tensor:
        return torch.full(tuple(shape), fill_value, **options)

    return _filled(make, size, mesh, placements, dtype, device, requires_grad)


def rand(
    size: Sequence[int], mesh: Any, placements: Any = None, *, dtype: Any = None, device: Any = None, requires_grad: bool = False
) -> DTensor:  # fmt: skip
    """Uniform random numbers, the same whatever the mesh: those of one stream over the whole tensor."""
    return _drawn(torch.rand, size, mesh, placements, dtype, device, requires_grad)


def randn(
    size: Sequence[int], mesh: Any, placements: Any = None, *, dtype: Any = None, device: Any = None, requires_grad: bool = False
) -> DTensor:  # fmt: skip
    """Normal random numbers, the same whatever the mesh: those of one stream over the whole tensor."""
    return _drawn(torch.randn, size, mesh, placements, dtype, device, requires_grad)


def _drawn(
    draw: Callable[..., torch.Tensor],
    size: Sequence[int],
    mesh: Any,
    placements: Any,
    dtype: Any,
    device: Any,
    requires_grad: bool,
) -> DTensor:
    """Every rank draws the whole stream, slab by slab, and keeps its part: time for the sake of one stream, not memory."""
    layout = mesh if isinstance(mesh, Layout) else as_layout(mesh, placements, len(size))
    spec = Spec(layout.without_partial(), tuple(size))
    box = box_of(spec.layout, spec.shape, coordinate_on(layout))
    device = device or layout.mesh.device_type
    row = math.prod(spec.shape[1:])
    step = max(1, _MOST_DRAWN_AT_ONCE // max(row, 1))
    if not size or spec.num_elements <= _MOST_DRAWN_AT_ONCE:
        local = draw(spec.shape, dtype=dtype, device=device)[_slices(box.starts, box.sizes)].clone()
    else:
        local = torch.empty(box.sizes, dtype=dtype, device=device)
        for begin in range(0, spec.shape[0], step):
            slab = draw((min(step, spec.shape[0] - begin), *spec.shape[1:]), dtype=dtype, device=device)
            first, last = max(begin, box.starts[0]), min(begin + slab.shape[0], box.starts[0] + box.sizes[0])
            if first < last:
                part = slab[_slices((first - begin, *box.starts[1:]), (last - first, *box.sizes[1:]))]
                local[first - box.starts[0] : last - box.starts[0]] = part
    made = wrapped(local, spec) if not layout.partial else wrapped(local, spec).redistribute(layout)
    return made.requires_grad_(requires_grad)


def _slices(starts: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))

"""DTensors from whole tensors and from nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import mindspore
from mindspore import Parameter, Tensor, mint, ops

from hyper_parallel._base.errors import ArgumentTypeError, describe
from hyper_parallel.core.dtensor.boxes import box_of
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.dtensor.placements import Placement
from hyper_parallel.core.shard.local_parts import as_layout, mesh_coordinate
from hyper_parallel.core.shard.spec import Spec
from hyper_parallel.platform.mindspore.communication import Communication
from hyper_parallel.platform.mindspore.devices import to_device_or_none
from hyper_parallel.platform.mindspore.dtensor.local_calls import check_seeded
from hyper_parallel.platform.mindspore.dtensor.local_tensors import box_of_tensor
from hyper_parallel.platform.mindspore.dtensor.movement import detached
from hyper_parallel.platform.mindspore.dtensor.tensor import DTensor, as_parameter, wrapped
from hyper_parallel.platform.mindspore.dtypes import to_dtype_or
from hyper_parallel.platform.mindspore.tensors import filled

__all__ = ["distribute_tensor", "empty", "full", "ones", "rand", "randn", "zeros"]

_MOST_DRAWN_AT_ONCE = 2**26  # elements; what is drawn at once must not depend on the mesh


def distribute_tensor(
    tensor: Tensor, mesh: DeviceMesh | Layout, placements: Sequence[Placement] | Layout | None = None
) -> DTensor:
    """The part of a whole tensor that belongs to this rank. Every rank has the tensor; nothing is communicated, and gradients flow to it.

    Raises:
        ValueError: a placement does not fit.
    """
    if isinstance(tensor, DTensor):
        return tensor.redistribute(mesh, placements)
    if not isinstance(tensor, Tensor):
        raise ArgumentTypeError(
            "Only a tensor can be distributed.", expected="a mindspore.Tensor", got=describe(tensor)
        )
    layout = as_layout(mesh, placements, tensor.ndim)
    whole = Spec(Layout(layout.mesh, ((),) * tensor.ndim), tuple(tensor.shape))
    if not isinstance(tensor, Parameter):
        return wrapped(tensor, whole).redistribute(layout)
    # A parameter's part is a leaf of its own, with memory of its own: the whole one can go.
    part = wrapped(detached(tensor), whole).redistribute(layout)
    return as_parameter(wrapped(owned(part._local), part._spec), tensor.name, tensor.requires_grad)


def owned(tensor: Tensor) -> Tensor:
    """A copy that is all of its memory, in no graph."""
    return Communication.transport.copy(tensor)


def _made(local: Tensor, spec: Spec, layout: Layout, requires_grad: bool) -> DTensor:
    made = wrapped(local, spec)
    if layout.partial:
        made = made.redistribute(layout)
    return made.requires_grad_() if requires_grad else made


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
    layout = as_layout(mesh, placements, len(size))
    spec = Spec(layout.without_partial(), tuple(size))
    shape = spec.local_shape_at(mesh_coordinate(layout.mesh))
    local = filled(shape, fill_value, to_dtype_or(dtype, mindspore.float32), to_device_or_none(device), "full")
    return _made(local, spec, layout, requires_grad)


def ones(size: Sequence[int], mesh: Any, placements: Any = None, **options: Any) -> DTensor:
    """A DTensor of ones; `size` is the global shape. Options are those of `full`."""
    return full(size, 1, mesh, placements, **options)


def zeros(size: Sequence[int], mesh: Any, placements: Any = None, **options: Any) -> DTensor:
    """A DTensor of zeros; `size` is the global shape. Options are those of `full`."""
    return full(size, 0, mesh, placements, **options)


def empty(
    size: Sequence[int], mesh: Any, placements: Any = None, *, dtype: Any = None, device: Any = None, requires_grad: bool = False
) -> DTensor:  # fmt: skip
    """A DTensor of whatever is in memory; `size` is the global shape."""
    layout = as_layout(mesh, placements, len(size))
    spec = Spec(layout.without_partial(), tuple(size))
    shape = spec.local_shape_at(mesh_coordinate(layout.mesh))
    local = mint.empty(shape, dtype=to_dtype_or(dtype, mindspore.float32), device=to_device_or_none(device))
    return _made(local, spec, layout, requires_grad)


def rand(
    size: Sequence[int], mesh: Any, placements: Any = None, *, dtype: Any = None, device: Any = None, requires_grad: bool = False
) -> DTensor:  # fmt: skip
    """Uniform random numbers, the same whatever the mesh: those of one stream over the whole tensor."""
    return _drawn(ops.rand, size, mesh, placements, dtype, device, requires_grad)


def randn(
    size: Sequence[int], mesh: Any, placements: Any = None, *, dtype: Any = None, device: Any = None, requires_grad: bool = False
) -> DTensor:  # fmt: skip
    """Normal random numbers, the same whatever the mesh: those of one stream over the whole tensor."""
    return _drawn(ops.randn, size, mesh, placements, dtype, device, requires_grad)


def _drawn(
    draw: Callable[..., Tensor],
    size: Sequence[int],
    mesh: Any,
    placements: Any,
    dtype: Any,
    device: Any,
    requires_grad: bool,
) -> DTensor:
    """Every rank draws the whole stream, slab by slab, and keeps its part: time for the sake of one stream, not memory."""
    layout = as_layout(mesh, placements, len(size))
    check_seeded(layout)
    spec = Spec(layout.without_partial(), tuple(size))
    box = box_of(spec.layout, spec.shape, mesh_coordinate(layout.mesh))
    kind = to_dtype_or(dtype, mindspore.float32)
    row = math.prod(spec.shape[1:])
    step = max(1, _MOST_DRAWN_AT_ONCE // max(row, 1))
    if not spec.num_elements:
        local = mint.empty(box.sizes, dtype=kind)
    elif not size:
        local = draw(1, dtype=kind).reshape(())
    else:
        parts: list[Tensor] = []
        for begin in range(0, spec.shape[0], step):
            slab = draw(min(step, spec.shape[0] - begin), *spec.shape[1:], dtype=kind)
            first, last = max(begin, box.starts[0]), min(begin + slab.shape[0], box.starts[0] + box.sizes[0])
            if first < last or not parts:
                sizes = (max(last - first, 0), *box.sizes[1:])
                parts.append(
                    box_of_tensor(slab, (max(first - begin, 0) if first < last else 0, *box.starts[1:]), sizes)
                )
        local = owned(parts[0] if len(parts) == 1 else mint.cat(parts, 0))
    target = to_device_or_none(device)
    return _made(local if target is None else local.to(target), spec, layout, requires_grad)

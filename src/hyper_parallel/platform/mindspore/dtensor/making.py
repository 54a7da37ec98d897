"""DTensors from whole tensors and from nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import mindspore
from mindspore import Parameter, Tensor, mint, ops

from hyper_parallel._base.errors import ArgumentTypeError, describe
from hyper_parallel.core.dtensor.boxes import Box, box_of
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
from hyper_parallel.platform.mindspore.tensors import filled as filled_tensor

__all__ = ["distribute_tensor", "drawn", "filled"]

_MOST_DRAWN_AT_ONCE = 2**26  # elements; what is drawn at once must not depend on the mesh


def distribute_tensor(
    tensor: Tensor, mesh: DeviceMesh | Layout, placements: Sequence[Placement] | Layout | None = None
) -> DTensor:
    """Return the part of a whole tensor that belongs to this rank.

    Every rank has the tensor; nothing is communicated, and gradients flow to it.

    Raises:
        ValueError: a placement does not fit.
        RuntimeError: the mesh has ranks that were not started.
    """
    if isinstance(tensor, DTensor):
        return tensor.redistribute(mesh, placements)
    if not isinstance(tensor, Tensor):
        raise ArgumentTypeError(
            "Only a tensor can be distributed.", expected="a mindspore.Tensor", got=describe(tensor)
        )
    layout = as_layout(mesh, placements, tensor.ndim)
    layout.mesh.check_started()
    whole = Spec(Layout(layout.mesh, ((),) * tensor.ndim), tuple(tensor.shape))
    if not isinstance(tensor, Parameter):
        return wrapped(tensor, whole).redistribute(layout)
    if tensor.is_meta:
        return _without_memory(tensor, Spec(layout, whole.shape))
    # A parameter's part is a leaf of its own, with memory of its own: the whole one can go.
    part = wrapped(detached(tensor), whole).redistribute(layout)
    return as_parameter(wrapped(owned(part._local), part._spec), tensor.name, tensor.requires_grad)


def _without_memory(parameter: Parameter, spec: Spec) -> DTensor:
    """Make the part of a parameter that has no memory yet, which has none either, and keep what fills it later."""
    box = box_of(spec.layout, spec.shape, mesh_coordinate(spec.layout.mesh))
    local = mint.empty(box.sizes, dtype=parameter.dtype, device="meta")
    made = as_parameter(wrapped(local, spec), parameter.name, parameter.requires_grad)
    made.init = parameter.init
    return made


def owned(tensor: Tensor) -> Tensor:
    """Copy a tensor, in no graph, into one that is all of its memory."""
    return Communication.transport.copy(tensor)


def filled(shape: Sequence[int], value: object, dtype: object, device: object, mesh: DeviceMesh) -> Tensor:
    """Make a local tensor of one value; None: of whatever is in memory."""
    kind, target = to_dtype_or(dtype, mindspore.float32), to_device_or_none(device)
    if value is None:
        return mint.empty(tuple(shape), dtype=kind, device=target)
    return filled_tensor(tuple(shape), value, kind, target, "full")


def drawn(kind: str, spec: Spec, box: Box, dtype: object, device: object) -> Tensor:
    """Draw random numbers over the whole tensor, and keep this rank's part."""
    check_seeded(spec.layout)
    draw = {"rand": ops.rand, "randn": ops.randn}[kind]
    number = to_dtype_or(dtype, mindspore.float32)
    row = math.prod(spec.shape[1:])
    step = max(1, _MOST_DRAWN_AT_ONCE // max(row, 1))
    if not spec.num_elements:
        local = mint.empty(box.sizes, dtype=number)
    elif not spec.shape:
        local = draw(1, dtype=number).reshape(())
    else:
        parts: list[Tensor] = []
        for begin in range(0, spec.shape[0], step):
            slab = draw(min(step, spec.shape[0] - begin), *spec.shape[1:], dtype=number)
            first, last = max(begin, box.starts[0]), min(begin + slab.shape[0], box.starts[0] + box.sizes[0])
            if first < last or not parts:
                sizes = (max(last - first, 0), *box.sizes[1:])
                parts.append(
                    box_of_tensor(slab, (max(first - begin, 0) if first < last else 0, *box.starts[1:]), sizes)
                )
        local = owned(parts[0] if len(parts) == 1 else mint.cat(parts, 0))
    target = to_device_or_none(device)
    return local if target is None else local.to(target)

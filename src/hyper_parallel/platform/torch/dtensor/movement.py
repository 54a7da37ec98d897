"""Moves values from one layout to another, and gradients on the way back. Rules T1 to T3 of `core/shard/README.md`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hyper_parallel.core.dtensor.gradients import gradient_divisor, gradient_layout
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.dtensor.redistribution import plan_redistribution, redistribute
from hyper_parallel.core.dtensor.redistribution.platform_transport import PlatformTransport
from hyper_parallel.core.shard.communication_log import why
from hyper_parallel.core.shard.local_parts import mesh_coordinate, noted_transport
from hyper_parallel.platform import get_torch_platform
from hyper_parallel.platform.torch.dtensor.local_tensors import TorchTensors

__all__ = ["Move", "Tie", "anchored", "coordinate_on", "extremes_reduced", "move_values", "reduce_values", "tied_to"]


# Collectives do not know these integers: they travel as wider ones.
_CARRIED = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}


def coordinate_on(layout: Layout) -> tuple[int, ...]:
    """Return where this process is on the layout's mesh.

    Raises:
        RuntimeError: the mesh does not have it.
    """
    return mesh_coordinate(layout.mesh)


def move_values(local: torch.Tensor, source: Layout, target: Layout, shape: tuple[int, ...]) -> torch.Tensor:
    """Bring a local tensor to the target layout, in no graph. It may be the same tensor, or share its memory."""
    if source is target:
        return local
    plan = plan_redistribution(source, target, shape, local.element_size())
    if not plan.steps:
        return local
    coordinate = coordinate_on(source)
    with torch.no_grad():
        if local.dtype in _CARRIED:
            wide = local.to(_CARRIED[local.dtype])
            return redistribute(wide, plan, coordinate, transport_for(wide, source.mesh)).to(local.dtype)
        return redistribute(local, plan, coordinate, transport_for(local, source.mesh))


def transport_for(local: torch.Tensor, mesh: DeviceMesh) -> PlatformTransport:
    """Return the collectives for tensors like this one, each of which is told to the communication log."""
    return noted_transport(get_torch_platform(), TorchTensors(local), mesh)


def reduce_values(tensor: torch.Tensor, mesh: DeviceMesh, axes: tuple[str, ...], op: str) -> torch.Tensor:
    """Reduce over the ranks of some axes, into a new tensor in no graph."""
    ranks = mesh.ranks_along(axes, mesh.rank_at(mesh_coordinate(mesh)))
    return transport_for(tensor, mesh).all_reduce(tensor.detach(), ranks, op)


class Move(torch.autograd.Function):
    """A redistribution that autograd records.

    Its backward goes from the gradient layout of the target to that of the source.
    """

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, source: Layout, target: Layout, shape: tuple[int, ...]) -> torch.Tensor:
        ctx.route = source, target, shape
        return move_values(local, source, target, shape).detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        source, target, shape = ctx.route
        factor = gradient_divisor(target) / gradient_divisor(source)
        grad = grad if factor == 1.0 else grad * factor
        with why("gradient", f"{source} -> {target}"):
            return Move.apply(grad, gradient_layout(target), gradient_layout(source), shape), None, None, None


class Tie(torch.autograd.Function):
    """The values of a tensor, tied to its source.

    A gradient that comes back in the layout `given` goes to the source in the layout `wanted`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        source: torch.Tensor,
        values: torch.Tensor | None,
        given: Layout,
        wanted: Layout,
        shape: tuple[int, ...],
        scale: float,
    ) -> torch.Tensor:
        ctx.route = given, wanted, shape, scale
        # `detach`: autograd takes this for a new tensor, not a view, and lets it be changed in place. They share the
        # version counter, so a change that backward must not miss is still found.
        return (source if values is None else values).detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        given, wanted, shape, scale = ctx.route
        if scale != 1.0:
            grad = grad * scale
        with why("gradient", f"{given} -> {wanted}"):
            return Move.apply(grad, given, wanted, shape), None, None, None, None, None


def tied_to(
    source: torch.Tensor,
    values: torch.Tensor | None,
    source_layout: Layout,
    layout: Layout,
    axes: tuple[str, ...],
    shape: tuple[int, ...],
) -> torch.Tensor:
    """Tie `values` (None: the source's own) of this layout to `source`.

    For uses whose gradient is partial on `axes`.
    """
    whole = gradient_layout(layout)
    given = Layout(whole.mesh, whole.axes_per_dim, tuple((axis, "sum") for axis in axes)) if axes else whole
    tied: torch.Tensor = Tie.apply(
        source,
        values,
        given,
        gradient_layout(source_layout),
        shape,
        gradient_divisor(layout) / gradient_divisor(source_layout),
    )
    return tied


class _Anchor(torch.autograd.Function):
    """Hands outputs on as they are; its inputs get a gradient of zeros beside whatever else they get (rule T3)."""

    @staticmethod
    def forward(ctx: Any, num_outputs: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.shapes = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors[num_outputs:]]
        return tuple(tensor.clone() for tensor in tensors[:num_outputs])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        zeros = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.shapes]
        return (None, *grads, *zeros)


def anchored(result: object, locals_: Sequence[torch.Tensor]) -> Any:
    """Put the result of a local operation on nothing into a graph with all of its inputs (rule T3)."""
    inputs = [local for local in locals_ if local.requires_grad]
    outputs = list(result) if isinstance(result, (list, tuple)) else [result]
    is_empty = any(isinstance(value, torch.Tensor) and value.numel() == 0 for value in (*locals_, *outputs))
    if not inputs or not is_empty or not torch.is_grad_enabled():
        return result
    chosen = [i for i, value in enumerate(outputs) if isinstance(value, torch.Tensor) and value.is_floating_point()]
    if not chosen:
        return result
    tied = _Anchor.apply(len(chosen), *(outputs[i] for i in chosen), *inputs)
    for index, value in zip(chosen, tied, strict=True):
        outputs[index] = value
    if not isinstance(result, (list, tuple)):
        return outputs[0]
    return type(result)(outputs) if type(result) in (list, tuple) else type(result)(tuple(outputs))


class _Extremes(torch.autograd.Function):
    """The reduction of `max`, `min` or `prod` over an axis, with the gradient that depends on the values.

    The gradient of the result is whole on every rank. It goes to the ranks that hold the extreme value, ties share it
    equally; of a product each rank gets it times the product of the others.
    """

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, mesh: DeviceMesh, axis: str, op: str) -> torch.Tensor:
        ranks = mesh.ranks_along(axis, mesh.rank_at(mesh_coordinate(mesh)))
        everyone = transport_for(local, mesh).all_gather(local.detach().unsqueeze(0), ranks, 0)
        me = ranks.index(mesh.rank_at(mesh_coordinate(mesh)))
        ctx.op, ctx.me = op, me
        ctx.save_for_backward(everyone)
        if op == "prod":
            return everyone.prod(0)
        return everyone.amax(0) if op == "max" else everyone.amin(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (everyone,) = ctx.saved_tensors
        if ctx.op == "prod":
            others = [everyone[index] for index in range(everyone.shape[0]) if index != ctx.me]
            return grad * torch.stack(others).prod(0), None, None, None
        extreme = everyone.amax(0) if ctx.op == "max" else everyone.amin(0)
        holders = everyone == extreme
        return grad * holders[ctx.me] / holders.sum(0), None, None, None


def extremes_reduced(local: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Layout]:
    """Carry out `max`, `min` and `prod` of the partial axes, in the order that the layout says."""
    for axis, op in reversed(layout.partial):
        if op in ("max", "min", "prod"):
            if layout.mesh.size(axis) > 1:
                local = _Extremes.apply(local, layout.mesh, axis, op)
            layout = layout.without_partial(axis)
    return local, layout

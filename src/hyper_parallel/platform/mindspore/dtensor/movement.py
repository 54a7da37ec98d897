"""Moves values from one layout to another, and gradients on the way back. Rules T1 to T3 of `core/shard/README.md`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from mindspore import Tensor, mint, ops
from mindspore.common import dtype as mstype
from mindspore.common._grad_function import _Function
from mindspore.graph.api import _no_grad, _pynative_executor

from hyper_parallel.core.dtensor.gradients import gradient_divisor, gradient_layout
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.dtensor.redistribution import plan_redistribution, redistribute
from hyper_parallel.core.shard.communication_log import why
from hyper_parallel.core.shard.local_parts import mesh_coordinate, noted_transport
from hyper_parallel.platform import get_mindspore_platform
from hyper_parallel.platform.mindspore.dtensor.local_tensors import MindSporeTensors

__all__ = [
    "Move",
    "Tie",
    "anchored",
    "detached",
    "extremes_reduced",
    "is_grad_enabled",
    "move_values",
    "reduce_values",
    "tied_to",
]

# A function that says whether operators are recorded now, by `value_and_grad` or on the tape.
is_grad_enabled = _pynative_executor.requires_grad


def detached(tensor: Tensor) -> Tensor:
    """Return the same memory outside of any graph."""
    return ops.stop_gradient(tensor)


def move_values(local: Tensor, source: Layout, target: Layout, shape: tuple[int, ...]) -> Tensor:
    """Bring a local tensor to the target layout, in no graph. It may be the same tensor, or share its memory."""
    if source is target:
        return local
    plan = plan_redistribution(source, target, shape, local.itemsize)
    if not plan.steps:
        return local
    with _no_grad():
        return redistribute(local, plan, mesh_coordinate(source.mesh), _transport(local, source.mesh))


def _transport(local: Tensor, mesh: DeviceMesh) -> Any:
    return noted_transport(get_mindspore_platform(), MindSporeTensors(local), mesh)


def reduce_values(tensor: Tensor, mesh: DeviceMesh, axes: tuple[str, ...], op: str) -> Tensor:
    """Reduce over the ranks of some axes, into a new tensor in no graph."""
    ranks = mesh.ranks_along(axes, mesh.rank_at(mesh_coordinate(mesh)))
    return _transport(tensor, mesh).all_reduce(detached(tensor), ranks, op)


class Move(_Function):
    """A redistribution that autograd records.

    Its backward goes from the gradient layout of the target to that of the source.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, source: Layout, target: Layout, shape: tuple[int, ...]) -> Tensor:
        ctx.route = source, target, shape
        return detached(move_values(local, source, target, shape))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        source, target, shape = ctx.route
        grad = _scaled(grad, gradient_divisor(target) / gradient_divisor(source))
        with why("gradient", f"{source} -> {target}"):
            return Move.apply(grad, gradient_layout(target), gradient_layout(source), shape), None, None, None


class Tie(_Function):
    """The values of a tensor, tied to its source.

    A gradient that comes back in the layout `given` goes to the source in the layout `wanted`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        source: Tensor,
        values: Tensor | None,
        given: Layout,
        wanted: Layout,
        shape: tuple[int, ...],
        scale: float,
    ) -> Tensor:
        ctx.route = given, wanted, shape, scale
        return detached(source if values is None else values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        given, wanted, shape, scale = ctx.route
        with why("gradient", f"{given} -> {wanted}"):
            return Move.apply(_scaled(grad, scale), given, wanted, shape), None, None, None, None, None


def _scaled(grad: Tensor, factor: float) -> Tensor:
    if factor == 1.0 or not grad.numel():
        return grad
    return grad * Tensor(factor, grad.dtype)  # a number would be rounded to float32 first


def tied_to(
    source: Tensor,
    values: Tensor | None,
    source_layout: Layout,
    layout: Layout,
    axes: tuple[str, ...],
    shape: tuple[int, ...],
) -> Tensor:
    """Tie `values` (None: the source's own) of this layout to `source`.

    For uses whose gradient is partial on `axes`.
    """
    whole = gradient_layout(layout)
    given = Layout(whole.mesh, whole.axes_per_dim, tuple((axis, "sum") for axis in axes)) if axes else whole
    scale = gradient_divisor(layout) / gradient_divisor(source_layout)
    return Tie.apply(source, values, given, gradient_layout(source_layout), shape, scale)


class _Anchor(_Function):
    """Hands outputs on as they are; its inputs get a gradient of zeros beside whatever else they get (rule T3)."""

    @staticmethod
    def forward(ctx: Any, num_outputs: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.inputs = [(tensor.shape, tensor.dtype) for tensor in tensors[num_outputs:]]
        return tuple(detached(tensor) for tensor in tensors[:num_outputs])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (None, *grads, *(mint.zeros(shape, dtype=dtype) for shape, dtype in ctx.inputs))


def anchored(result: object, locals_: Sequence[Tensor]) -> Any:
    """Put the result of a local operation on nothing into a graph with all of its inputs (rule T3)."""
    inputs = [local for local in locals_ if local._requires_grad]
    outputs = list(result) if isinstance(result, (list, tuple)) else [result]
    is_empty = any(isinstance(value, Tensor) and value.numel() == 0 for value in (*locals_, *outputs))
    if not inputs or not is_empty or not is_grad_enabled():
        return result
    chosen = [i for i, value in enumerate(outputs) if isinstance(value, Tensor) and value.dtype in mstype.float_type]
    if not chosen:
        return result
    tied = _Anchor.apply(len(chosen), *(outputs[i] for i in chosen), *inputs)
    for index, value in zip(chosen, tied if isinstance(tied, (list, tuple)) else [tied], strict=True):
        outputs[index] = value
    return type(result)(outputs) if isinstance(result, (list, tuple)) else outputs[0]


class _Extremes(_Function):
    """The reduction of `max`, `min` or `prod` over an axis, with the gradient that depends on the values.

    The gradient of the result is whole on every rank. It goes to the ranks that hold the extreme value, ties share it
    equally; of a product each rank gets it times the product of the others.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, mesh: DeviceMesh, axis: str, op: str) -> Tensor:
        me = mesh.rank_at(mesh_coordinate(mesh))
        ranks = mesh.ranks_along(axis, me)
        gathered = _transport(local, mesh).all_gather(local.reshape((1, *local.shape)), ranks, 0)
        ctx.op, ctx.me, ctx.num = op, ranks.index(me), len(ranks)
        ctx.save_for_backward(gathered)
        return functools.reduce(_COMBINE[op], _rows(gathered, len(ranks)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (gathered,) = ctx.saved_tensors
        rows = _rows(gathered, ctx.num)
        if ctx.op == "prod":
            others = [row for index, row in enumerate(rows) if index != ctx.me]
            return grad * functools.reduce(_COMBINE["prod"], others), None, None, None
        extreme = functools.reduce(_COMBINE[ctx.op], rows)
        holders = [(row == extreme).to(grad.dtype) for row in rows]
        return grad * holders[ctx.me] / functools.reduce(_COMBINE["sum"], holders), None, None, None


_COMBINE: dict[str, Any] = {
    "sum": lambda left, right: left + right,
    "prod": lambda left, right: left * right,
    "max": ops.maximum,
    "min": ops.minimum,
}


def _rows(gathered: Tensor, count: int) -> list[Tensor]:
    return [mint.narrow(gathered, 0, index, 1).reshape(tuple(gathered.shape[1:])) for index in range(count)]


def extremes_reduced(local: Tensor, layout: Layout) -> tuple[Tensor, Layout]:
    """Carry out `max`, `min` and `prod` of the partial axes, in the order that the layout says."""
    for axis, op in reversed(layout.partial):
        if op in ("max", "min", "prod"):
            if layout.mesh.size(axis) > 1:
                local = _Extremes.apply(local, layout.mesh, axis, op)
            layout = layout.without_partial(axis)
    return local, layout

"""Norms of gradients that lie differently: each element counts once, wherever it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mindspore import Tensor, ops

from hyper_parallel.core.dtensor.gradients import gradient_layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.shard.communication_log import why
from hyper_parallel.platform.mindspore.dtensor.movement import reduce_values
from hyper_parallel.platform.mindspore.dtensor.tensor import DTensor

__all__ = ["powers_over_ranks"]


def powers_over_ranks(
    parameters: Sequence[Tensor],
    power: Callable[[Tensor | None], Tensor],
    combined: Callable[[list[Tensor]], Tensor],
    op: str,
) -> Tensor:
    """Combine the powers of all gradients, equal on all ranks; one collective per mesh and set of axes.

    `_grad` of a distributed parameter is this rank's part.
    """
    parts: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        place: Any = None
        if isinstance(parameter, DTensor):
            layout = gradient_layout(parameter.layout)
            place = layout.mesh, layout.varying_axes
        parts.setdefault(place, []).append(power(parameter._grad))
    found = []
    for place, powers in parts.items():
        value = combined(powers)
        if place is not None and place[1]:
            mesh, axes = place
            with why("asked", "clip_grad_norm_"):
                value = _reduced(value, mesh, axes, op)
        found.append(value)
    return combined(found)


def _reduced(value: Tensor, mesh: DeviceMesh, axes: tuple[str, ...], op: str) -> Tensor:
    """Combine a number over ranks. The largest of some is NaN if one is, which a collective may pass over."""
    if op != "max":
        return reduce_values(value.reshape((1,)), mesh, axes, op).reshape(())
    is_nan = ops.isnan(value)
    zero = Tensor(0.0, value.dtype)
    both = ops.stack([ops.where(is_nan, zero, value), ops.where(is_nan, zero + 1, zero)])
    both = reduce_values(both, mesh, axes, op)
    return ops.where(both[1] > 0, Tensor(float("nan"), value.dtype), both[0])

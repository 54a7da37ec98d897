"""Norms of gradients that lie differently: each element counts once, wherever it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mindspore import Tensor

from hyper_parallel.core.dtensor.gradients import gradient_layout
from hyper_parallel.core.shard.communication_log import why
from hyper_parallel.platform.mindspore.dtensor.movement import reduce_values
from hyper_parallel.platform.mindspore.dtensor.tensor import DTensor

__all__ = ["powers_over_ranks"]


def powers_over_ranks(
    parameters: Sequence[Tensor], power: Callable[[Tensor], Tensor], combined: Callable[[list[Tensor]], Tensor], op: str
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
                value = reduce_values(value.reshape((1,)), mesh, axes, op).reshape(())
        found.append(value)
    return combined(found)

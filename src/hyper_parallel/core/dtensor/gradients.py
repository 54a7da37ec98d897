"""In which layout the local gradients of a tensor are. See the README, rules G1 to G4."""

from __future__ import annotations

import math

from hyper_parallel._base.errors import ArgumentError
from hyper_parallel.core.dtensor.layout import Layout

__all__ = ["gradient_layout", "gradient_scale"]

_LINEAR = ("sum", "avg")


def gradient_layout(layout: Layout) -> Layout:
    """The layout of the gradient with respect to the local tensors of a tensor of this layout.

    Sharded stays sharded; replicated stays replicated, each rank has the whole gradient; partial becomes replicated, since every
    rank's summand has the gradient of the sum. For `avg` the local gradient is that times `gradient_scale`.

    Raises:
        ValueError: partial by `max`, `min` or `prod`, whose gradient depends on the values.
    """
    for axis, op in layout.partial:
        if op not in _LINEAR and layout.mesh.size(axis) > 1:
            raise ArgumentError(
                f"The gradient of a tensor that is partial by {op} depends on its values, not on its layout alone.",
                expected="partial by sum or avg",
                got=repr(layout),
                do="Reduce it with `differentiable_all_reduce`, whose gradient knows the values.",
            )
    return layout.without_partial()


def gradient_scale(layout: Layout) -> float:
    """What the gradient is multiplied with to give the local one: 1 over the sizes of the axes that are partial by `avg`."""
    return 1.0 / math.prod(layout.mesh.size(axis) for axis, op in layout.partial if op == "avg")

"""In which layout local gradients are, and how they go back through a redistribution. See the README, rules G1 to G4."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from hyper_parallel._base.errors import ArgumentError
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.redistribution.plan import Plan, plan_redistribution

__all__ = ["GradientPlan", "gradient_divisor", "gradient_layout", "plan_gradient"]

_LINEAR = ("sum", "avg")


class GradientPlan(NamedTuple):
    """The gradient goes through `plan`, is multiplied and divided."""

    plan: Plan
    multiplier: int
    divisor: int


@lru_cache(maxsize=4096)
def gradient_layout(layout: Layout) -> Layout:
    """The layout of the gradient with respect to the local tensors of a tensor of this layout.

    Sharded stays sharded; replicated stays replicated, each rank has the whole gradient; partial becomes replicated, since every
    rank's summand has the gradient of the sum. For `avg` the local gradient is that over `gradient_divisor`.

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


def gradient_divisor(layout: Layout) -> int:
    """What the gradient is divided by to give the local one: the ranks of the axes that are partial by `avg`."""
    return math.prod(layout.mesh.size(axis) for axis, op in layout.partial if op == "avg")


def plan_gradient(source: Layout, target: Layout, shape: Sequence[int], itemsize: int = 4) -> GradientPlan:
    """How the local gradient of what `source -> target` gave becomes that of what it was given.

    Raises:
        ValueError: one of them is partial by `max`, `min` or `prod`.
    """
    multiplier, divisor = gradient_divisor(target), gradient_divisor(source)
    common = math.gcd(multiplier, divisor)
    plan = plan_redistribution(gradient_layout(target), gradient_layout(source), shape, itemsize)
    return GradientPlan(plan, multiplier // common, divisor // common)

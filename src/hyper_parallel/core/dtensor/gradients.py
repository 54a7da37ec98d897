"""In which layout local gradients are, and how they go back through a redistribution.

See the README, rules G1 to G6.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from hyper_parallel._base.errors import ArgumentError
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.redistribution.partial import partial_work
from hyper_parallel.core.dtensor.redistribution.plan import Plan, plan_redistribution

__all__ = ["GradientPlan", "gradient_divisor", "gradient_layout", "plan_gradient", "value_reductions"]

_LINEAR = ("sum", "avg")


class GradientPlan(NamedTuple):
    """The way of a local gradient back through a redistribution: through `plan`, times `multiplier`, over `divisor`."""

    plan: Plan
    multiplier: int
    divisor: int


@lru_cache(maxsize=4096)
def gradient_layout(layout: Layout) -> Layout:
    """Return the layout of the gradient with respect to the local tensors of a tensor of this layout.

    Sharded stays sharded; replicated stays replicated, each rank has the whole gradient. Partial by `sum` becomes
    replicated, since every rank's summand has the gradient of the sum; by `avg` too, over `gradient_divisor`. By `max`
    or `min` it is partial by `sum`: the gradient lies with the ranks that hold the extreme value, and all ranks
    together have it once.

    Raises:
        ValueError: partial by `prod`, whose local gradients are no parts of the gradient.
    """
    partial = []
    for axis, op in layout.partial:
        if op in ("max", "min"):
            partial.append((axis, "sum"))
        elif op not in _LINEAR and layout.mesh.size(axis) > 1:
            raise ArgumentError(
                f"The local gradients of a tensor that is partial by {op} depend on its values, not on its layout "
                "alone.",
                expected="partial by sum, avg, max or min",
                got=repr(layout),
                do="Reduce it with `differentiable_all_reduce`, whose gradient knows the values.",
            )
    return layout.replace(partial=tuple(partial))


def gradient_divisor(layout: Layout) -> int:
    """Return what the gradient is divided by to give the local one: the ranks of the axes that are partial by `avg`."""
    return math.prod(layout.mesh.size(axis) for axis, op in layout.partial if op == "avg")


def value_reductions(source: Layout, target: Layout) -> tuple[tuple[str, str], ...]:
    """List the axes, with their ops, that must be reduced before `source -> target` has a gradient by layouts alone.

    These are reductions by `max`, `min` and `prod`, whose gradients depend on values, and those that come before them
    (L4). After `differentiable_all_reduce` over each of them the source is `source.without_partial(*axes)`, and there
    are none left.
    """
    runs = partial_work(source, target).runs
    last = max((index for index, run in enumerate(runs) if source.partial_op(run[0]) not in _LINEAR), default=-1)
    axes = [axis for run in runs[: last + 1] for axis in reversed(run) if source.mesh.size(axis) > 1]
    return tuple((axis, source.partial_op(axis) or "") for axis in axes)


def plan_gradient(source: Layout, target: Layout, shape: Sequence[int], itemsize: int = 4) -> GradientPlan:
    """Plan how the local gradient of what `source -> target` gave becomes that of what it was given.

    Raises:
        ValueError: something is reduced by `max`, `min` or `prod` (`value_reductions`), or stays or becomes partial by
            `prod`.
    """
    by_value = value_reductions(source, target)
    if by_value:
        raise ArgumentError(
            "The gradient of a redistribution that reduces by max, min or prod depends on the values.",
            expected="partial by sum or avg where it is reduced",
            got=f"{source} -> {target}",
            do=f"Call `differentiable_all_reduce` over {', '.join(axis for axis, _ in by_value)} before.",
        )
    multiplier, divisor = gradient_divisor(target), gradient_divisor(source)
    common = math.gcd(multiplier, divisor)
    plan = plan_redistribution(gradient_layout(target), gradient_layout(source), shape, itemsize)
    return GradientPlan(plan, multiplier // common, divisor // common)

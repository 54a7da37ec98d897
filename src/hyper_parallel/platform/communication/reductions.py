"""Reductions: one enum for all of their names."""

from __future__ import annotations

from enum import Enum
from typing import Any

from hyper_parallel._base.errors import ArgumentError, describe


class Reduction(Enum):
    """How values of several ranks become one."""

    SUM = "sum"
    AVG = "avg"
    MAX = "max"
    MIN = "min"
    PROD = "prod"


_NAMES = {reduction.value: reduction for reduction in Reduction} | {"mean": Reduction.AVG, "product": Reduction.PROD}

EXTREMES = (Reduction.MAX, Reduction.MIN)


def to_reduction(
    op: object, native: dict[Any, Reduction], accepted: tuple[Reduction, ...] = tuple(Reduction)
) -> Reduction:
    """Find the reduction of a name in any case, of the enum itself, or of the framework's own (`native`)."""
    found: Reduction | None = None
    if isinstance(op, Reduction):
        found = op
    elif isinstance(op, str):
        found = _NAMES.get(op.strip().lower())
    else:
        for name, reduction in native.items():
            if op == name:
                found = reduction
    if found not in accepted:
        names = ", ".join(reduction.value for reduction in accepted)
        raise ArgumentError("There is no such reduction here.", expected=f"one of {names}", got=describe(op))
    return found


def check_can_average(reduction: Reduction, is_floating: bool, call: str, data: object) -> None:
    if reduction is Reduction.AVG and not is_floating:
        raise ArgumentError(
            f"`{call}` cannot average whole numbers.",
            expected="a floating dtype",
            got=describe(data),
            do="Reduce with `sum` and divide, or cast first.",
        )

"""What a step would take under other budgets: the line that a plan is a point of."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from hyper_parallel.core.planner.model.profile import StepProfile
from hyper_parallel.core.planner.plan.proof import first_margin, solved
from hyper_parallel.core.planner.search.choosing import smallest_budget
from hyper_parallel.core.planner.solve.solver import BudgetError


class CurvePoint(NamedTuple):
    """The fastest step that was found within a budget, by prediction."""

    budget_bytes: int
    peak_bytes: int
    step_ms: float


def budget_curve(
    profile: StepProfile, known: Sequence[CurvePoint] = (), *, num_budgets: int = 8, time_limit_s: float = 15.0
) -> list[CurvePoint]:
    """Solve for some budgets, from the smallest that can be met to the peak of the plain step; points come by budget.

    Where the time is up there are fewer points; the two ends come first, then what lies in the middle of the largest
    gap. A step that fits into a budget fits into every larger one, so no point is slower than one before it, or than
    one that is `known`.

    Raises:
        FrameworkMissingError: SciPy is not installed.
    """
    until = time.monotonic() + time_limit_s
    margin = first_margin(profile)
    plain = CurvePoint(profile.peak_bytes, profile.peak_bytes, profile.step_ms)
    smallest = smallest_budget(profile, margin)
    if smallest >= plain.budget_bytes:
        return [plain]
    found = {plain.budget_bytes: plain}
    budgets = _budgets(smallest, plain.budget_bytes, num_budgets)
    for number, budget in enumerate(budgets):
        left_s = until - time.monotonic()
        if left_s <= 0:
            break
        try:
            plan = solved(profile, budget, margin_bytes=margin, time_limit_s=left_s / (len(budgets) - number))
        except BudgetError:  # by a few bytes, at the lower end
            continue
        found[budget] = CurvePoint(budget, plan.predicted.peak_bytes, plan.predicted.step_ms)
    return [_best(point, [*found.values(), *known]) for _, point in sorted(found.items())]


def _budgets(smallest: int, largest: int, num_budgets: int) -> list[int]:
    """Choose budgets, closer together where memory is short, since time changes most there.

    They come in an order that covers the whole range early.
    """
    count = max(num_budgets - 1, 1)
    steps = [smallest + int((largest - smallest) * (index / count) ** 1.5) for index in range(count)]
    order, rest = steps[:1], steps[1:]
    while rest:
        known = [*order, largest]
        order.append(max(rest, key=lambda step: min(abs(step - other) for other in known)))
        rest.remove(order[-1])
    return order


def _best(point: CurvePoint, others: Sequence[CurvePoint]) -> CurvePoint:
    """Take the fastest of all points that fit into this one's budget."""
    best = min((other for other in others if other.budget_bytes <= point.budget_bytes), key=lambda other: other.step_ms)
    return point if point.step_ms <= best.step_ms else best._replace(budget_bytes=point.budget_bytes)

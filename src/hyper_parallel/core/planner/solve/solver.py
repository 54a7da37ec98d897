"""The least time within the budget, with HiGHS.

A problem is solved as two cases, since what is in flight (P4) is paid as soon as anything is swapped: once with it, and
once with nothing swapped. How a case is solved is in `branch`. Every answer has been through `problem.evaluate`: what a
model gets wrong can make a plan slower than it need be, or its bound too good, but never larger than the budget.

The same problem gives the same plan: HiGHS runs in one thread with a fixed seed, and is bounded by numbers of nodes.
Only where `time_limit_s` ends the work does the plan depend on the machine.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from hyper_parallel.core.planner.model.choices import Decision, plain, recompute_all, swapped_bytes
from hyper_parallel.core.planner.model.problem import Cost, Problem, evaluate
from hyper_parallel.core.planner.model.profile import StepProfile
from hyper_parallel.core.planner.solve.branch import Branching, plain_ms
from hyper_parallel.core.planner.solve.linear_model import Clock
from hyper_parallel.core.planner.solve.peak import smallest_peak
from hyper_parallel.core.planner.solve.refusal import BudgetError, budget_error
from hyper_parallel.core.planner.solve.rows import Case

__all__ = ["BudgetError", "Solution", "is_small", "smallest_peak", "solve"]

_SMALL = 80  # ops and inputs of all regions together: solved exactly
_MEDIUM = 1000  # solved with a whole number for each op
_GOOD_GAP = 5e-4  # without a wish of the caller, enough for a problem that is not small
_PROVED_GAP = 1e-6  # what HiGHS is exact to


@dataclass(frozen=True)
class Solution:
    """A decision within the budget, and how good it is.

    Attributes:
        lower_bound_ms: proved: no decision within the budget is faster
        gap: how much faster the best could be at most, as a part of this one's step
        seconds: that solving took
    """

    decision: Decision
    cost: Cost
    lower_bound_ms: float
    gap: float
    proved_optimal: bool
    seconds: float


def solve(problem: Problem, *, gap: float | None = None, time_limit_s: float = 10.0) -> Solution:
    """Find the fastest decision within the budget, or one that is nearly as fast and a bound that says how nearly.

    Args:
        gap: how much slower than the bound is good enough. Without it, a small problem is solved exactly and a large
            one to 0.05 % or as far as a fixed effort goes.
        time_limit_s: when to stop in any case.

    Raises:
        BudgetError: no decision fits; it names the smallest peak that does and what this is made of.
        FrameworkMissingError: SciPy is not installed.
    """
    clock = Clock(time_limit_s)
    ready = _ready(problem)
    if ready is not None and _is_plain(ready[0]):
        return _solution(ready, ready[1].step_ms, clock)
    scaled, ticks_per_ms = _in_ticks(problem)
    cases = [Case(scaled, True), Case(scaled, False)] if problem.can_swap else [Case(scaled, False)]
    branchings = [Branching(case, problem.budget_bytes, clock) for case in cases]
    for branching in branchings:
        branching.offer(ready)
    size = _size(problem.profile)
    if size <= _SMALL:
        _solve_small(branchings, 0.0 if gap is None else gap)
    else:
        _solve_large(branchings, _GOOD_GAP if gap is None else gap, size)
    best = _best(branchings)
    if best is None:
        best = smallest_peak(problem)
        if best[1].peak_bytes > problem.budget_bytes:
            raise budget_error(problem.profile, problem.budget_bytes, best[1].peak)
    bound_ms = min(branching.bound_ms for branching in branchings) / ticks_per_ms
    return _solution((best[0], evaluate(problem, best[0])), bound_ms, clock)


def _in_ticks(problem: Problem) -> tuple[Problem, float]:
    """Measure the problem's time in ticks, of which a plain step takes some thousands.

    With it comes how many of them a millisecond has. HiGHS takes prices below 1e-7 for nothing, and those of bytes in a
    step of a few milliseconds are. Times are multiplied by a power of two, so none of them is rounded.
    """
    ticks = 2.0 ** (13 - math.frexp(plain_ms(problem))[1])
    regions = tuple(
        dataclasses.replace(
            region,
            ops=tuple(dataclasses.replace(op, forward_ms=op.forward_ms * ticks) for op in region.ops),
            forward_ms=region.forward_ms * ticks,
            backward_ms=region.backward_ms * ticks,
            before_ms=region.before_ms * ticks,
            after_ms=region.after_ms * ticks,
        )
        for region in problem.profile.regions
    )
    link = problem.profile.link
    profile = dataclasses.replace(
        problem.profile,
        regions=regions,
        turn=dataclasses.replace(problem.profile.turn, ms=problem.profile.turn.ms * ticks),
        link=link
        and dataclasses.replace(
            link, out_bytes_per_ms=link.out_bytes_per_ms / ticks, in_bytes_per_ms=link.in_bytes_per_ms / ticks
        ),
    )
    scaled = dataclasses.replace(problem, profile=profile, region_overhead_ms=problem.region_overhead_ms * ticks)
    return scaled, ticks


def is_small(profile: StepProfile) -> bool:
    """Say whether the problems of this profile are solved exactly."""
    return _size(profile) <= _SMALL


def _size(profile: StepProfile) -> int:
    return sum(len(region.ops) + len(region.inputs) for region in profile.regions)


def _ready(problem: Problem) -> tuple[Decision, Cost] | None:
    """Find what needs no search: nothing managed, or every region recomputed, if it fits."""
    regions = problem.profile.regions
    decisions: list[Decision] = [tuple(recompute_all(region) for region in regions)]
    if all(region.may_be_plain for region in regions):
        decisions.append(tuple(plain(region) for region in regions))
    found = []
    for decision in decisions:
        if problem.can_swap or not any(map(swapped_bytes, regions, decision)):
            cost = evaluate(problem, decision)
            if cost.peak_bytes <= problem.budget_bytes:
                found.append((decision, cost))
    return min(found, key=lambda pair: (pair[1].step_ms, pair[1].peak_bytes), default=None)


def _is_plain(decision: Decision) -> bool:
    """Say whether nothing is managed. Then nothing is faster."""
    return all(chosen.is_plain for chosen in decision)


def _solve_small(branchings: Sequence[Branching], gap: float) -> None:
    for branching in branchings:
        branching.exact(gap, node_limit=50_000)


def _solve_large(branchings: Sequence[Branching], gap: float, size: int) -> None:
    for branching in branchings:
        branching.relax()
    best = None
    for branching in sorted(branchings, key=lambda branching: branching.bound_ms):
        branching.offer(best)
        if branching.gap > gap and not branching.is_infeasible:
            branching.add_bases()
            for num_left in (15, 40):
                if branching.gap > gap:
                    branching.dive(num_left, gap / 3, node_limit=20)
        enough = gap / 10 if size <= _MEDIUM else 2 * gap
        if branching.gap > enough and not branching.is_infeasible:
            branching.refine(min(enough, gap), node_limit=50 if size <= _MEDIUM else 1)
        best = branching.best


def _best(branchings: Sequence[Branching]) -> tuple[Decision, Cost] | None:
    found = [branching.best for branching in branchings if branching.best is not None]
    return min(found, key=lambda pair: (pair[1].step_ms, pair[1].peak_bytes), default=None)


def _solution(best: tuple[Decision, Cost], bound_ms: float, clock: Clock) -> Solution:
    step_ms = best[1].step_ms
    lower_bound_ms = min(bound_ms, step_ms)
    gap = (step_ms - lower_bound_ms) / step_ms if step_ms else 0.0
    return Solution(*best, lower_bound_ms, gap, gap <= _PROVED_GAP, clock.passed_s)

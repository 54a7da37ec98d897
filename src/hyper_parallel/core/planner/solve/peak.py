"""The smallest peak there is, exactly.

In time nothing is to be gained here, so everything is swapped that can be, or nothing. What is left is a choice between
keeping less and having less extra (P1, P2). Given a peak, each region in turn keeps as little as it can within it: what
it keeps is all that the regions after it see. The smallest peak for which this works is found by bisection.
"""

from __future__ import annotations

from typing import Any

from hyper_parallel._base.errors import ArgumentError
from hyper_parallel.core.planner.model.choices import Decision, bytes_of
from hyper_parallel.core.planner.model.problem import Cost, Problem, peak
from hyper_parallel.core.planner.solve.block import Base, RegionRows, add_region_rows, base_of
from hyper_parallel.core.planner.solve.linear_model import INFINITY, Clock, Model
from hyper_parallel.core.planner.solve.rows import Case
from hyper_parallel.core.planner.solve.split import split

_NO_LIMIT = Clock(INFINITY)
_ANY_BYTES = 1 << 60  # more than there are


def smallest_peak(problem: Problem) -> tuple[Decision, Cost]:
    """Find a decision with the smallest peak, whatever the budget; the fastest that is easily found.

    Raises:
        ArgumentError: a region has no decision that can be carried out.
        FrameworkMissingError: SciPy is not installed.
    """
    cases = [Case(problem, False), Case(problem, True)] if problem.can_swap else [Case(problem, False)]
    found = [smallest for smallest in map(_smallest, cases) if smallest is not None]
    if not found:
        raise _no_decision(cases[-1])
    return min(found, key=lambda pair: (pair[1].peak_bytes, pair[1].step_ms))


def _smallest(case: Case) -> tuple[Decision, Cost] | None:
    leanest = _Leanest(case)
    bases = _within(case, leanest, _ANY_BYTES)
    if bases is None:
        return None
    high = _peak_bytes(case, bases)
    low = case.problem.profile.base_bytes
    while low < high:
        middle = (low + high) // 2
        better = _within(case, leanest, middle)
        if better is None:
            low = middle + 1
        else:
            bases, high = better, min(_peak_bytes(case, better), middle)
    return split(case, bases, [0.0] * len(bases), high)


def _within(case: Case, leanest: _Leanest, peak_bytes: int) -> list[Base] | None:
    """Let each region in turn keep as little as it can within that peak. None: one has no base that fits."""
    *rooms, room_in_turn = case.rooms(peak_bytes)
    kept = 0
    bases = []
    for index, room in enumerate(rooms):
        base = leanest.base(index, room - kept)
        if base is None:
            return None
        bases.append(base)
        kept += base.store_bytes - base.region_bytes.swapped_bytes - base.free_bytes
    return bases if kept <= room_in_turn else None


def _peak_bytes(case: Case, bases: list[Base]) -> int:
    """Compute the peak with all swapped that can be.

    It is that of this case, so what is in flight counts even if nothing is.
    """
    decision = [base.swapping(position for position, _ in base.free) if base.free else base.decision for base in bases]
    by_region = [bytes_of(region, chosen) for region, chosen in zip(case.regions, decision, strict=True)]
    return peak(case.problem, by_region, swaps=case.swaps).num_bytes


def _no_decision(case: Case) -> ArgumentError:
    leanest = _Leanest(case)
    paths = (region.path for index, region in enumerate(case.regions) if leanest.base(index, _ANY_BYTES) is None)
    return ArgumentError(
        "A region can neither be left plain nor be managed.",
        expected="for each residual a choice that can be carried out",
        got="one that can only be swapped" if not case.swaps else "one whose op would run again without what it reads",
        where=next(paths, None),
        do="Give its ops more choices" + ("." if case.swaps else ", or profile with a link to the host."),
    )


class _Leanest:
    """Finds for each region the base that keeps least with at most so much extra.

    Regions of one shape share the answers.
    """

    def __init__(self, case: Case) -> None:
        self._case = case
        shapes: dict[tuple[Any, ...], int] = {}
        self._kind = [shapes.setdefault(region.shape(), len(shapes)) for region in case.regions]
        self._known: list[list[tuple[int, Base | None]]] = [[] for _ in shapes]

    def base(self, index: int, extra_bytes: int) -> Base | None:
        """Find the base of a region that keeps least. None: no base has so little extra."""
        known = self._known[self._kind[index]]
        for limit, base in known:
            if extra_bytes <= limit and (base is None or base.region_bytes.extra_bytes <= extra_bytes):
                return base
        base = self._solve(index, extra_bytes)
        known.append((extra_bytes, base))
        return base

    def _solve(self, index: int, extra_bytes: int) -> Base | None:
        case, region = self._case, self._case.regions[index]
        limit = extra_bytes
        while limit >= 0:  # with less than nothing extra there is no base
            model = Model()
            rows = add_region_rows(model, region, case.swaps, case.unit, extra_bytes)
            model.row(rows.extra, high=min(limit, _ANY_BYTES >> 10) / case.unit)
            model.set_costs(_kept(rows, region.residual_bytes / case.unit))
            answer = model.solve(_NO_LIMIT, gap=0.0, node_limit=100_000)
            if answer.x is None:
                return None
            base = base_of(region, rows.stored_in(answer.x), case.swaps)
            if base.region_bytes.extra_bytes <= extra_bytes:
                return base
            limit -= base.region_bytes.extra_bytes - extra_bytes  # the solver is exact to a few bytes only
        return None


def _kept(rows: RegionRows, residual: float) -> list[tuple[int, float]]:
    gone = {variable for variable, _ in (*rows.free, *rows.forced)}
    kept = [(variable, num) for variable, num in rows.store if variable not in gone]
    return kept if rows.plain is None else [*kept, (rows.plain, residual)]

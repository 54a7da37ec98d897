"""The rules of the peak and of time as rows of a model. What they mean is said once, in `problem.evaluate`.

Times are counted from when they would be in a plain step, so that all of them are waiting times and of one size. Every
maximum of the rules becomes two rows: each time is at least either side, and the least step makes it no later than it
must be.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

from hyper_parallel.core.planner.model.problem import Moment, Problem
from hyper_parallel.core.planner.model.profile import Region
from hyper_parallel.core.planner.solve.linear_model import INFINITY, Model


@dataclass(frozen=True)
class Case:
    """A problem with one half of the question answered.

    Either something may be swapped and P4 is paid, or nothing is and it is not.
    """

    problem: Problem
    swaps: bool

    @property
    def regions(self) -> tuple[Region, ...]:
        return self.problem.profile.regions

    @cached_property
    def unit(self) -> float:
        """Choose how many bytes the model counts as one.

        HiGHS keeps rows to 1e-6 of a unit, and likes numbers of moderate size.
        """
        largest = max((region.residual_bytes for region in self.regions), default=0)
        return max(1.0, largest / 4096)

    def in_flight_bytes(self, moment: Moment, region: int | None = None) -> int:
        return self.problem.in_flight_bytes(moment, region) if self.swaps else 0

    def rooms(self, budget_bytes: int) -> list[int]:
        """Count for each region what those before it may keep, with what it has extra itself; last, what all may
        keep.
        """
        profile = self.problem.profile
        room = budget_bytes - profile.base_bytes - self.problem.margin_bytes
        backward = self.in_flight_bytes("backward")
        own = [
            region.outside_bytes
            + max(
                region.forward_peak_bytes + self.in_flight_bytes("forward", index),
                region.backward_peak_bytes + backward,
            )
            for index, region in enumerate(self.regions)
        ]
        return [*(room - own_bytes for own_bytes in own), room - profile.turn.peak_bytes - self.in_flight_bytes("turn")]


@dataclass(frozen=True)
class Places:
    """Variables for what each region puts where, and for the waiting times that come of it."""

    kept: list[int]
    swapped: list[int]
    extra: list[int]
    recompute: list[int]  # with the overhead of a managed region
    forward_wait: list[int]
    backward_wait: list[int]


def add_rows(model: Model, case: Case, budget_bytes: int, *, overrun_cost: float | None = None) -> Places:
    """Add the rules of the peak and of time for all regions.

    With `overrun_cost`, for each unit, the budget may be overrun: a model that always has a solution.
    """
    num = len(case.regions)
    kept, swapped, extra, recompute = ([model.variable() for _ in range(num)] for _ in range(4))
    waits = _add_times(model, case, swapped, recompute) if case.swaps else ([], [])
    places = Places(kept, swapped, extra, recompute, *waits)
    over = [] if overrun_cost is None else [(model.variable(cost=overrun_cost), -1.0)]
    _add_peaks(model, case, places, budget_bytes, over)
    profile = case.problem.profile
    model.constant += profile.turn.ms
    for index, region in enumerate(case.regions):
        model.constant += region.before_ms + region.forward_ms + region.backward_ms + region.after_ms
        if not case.swaps:
            model.fix(swapped[index], 0.0)
            model.add_cost(recompute[index], 1.0)
    if case.swaps and num:
        model.add_cost(places.forward_wait[-1], 1.0)
        model.add_cost(places.backward_wait[0], 1.0)
        model.add_cost(recompute[0], 1.0)  # that of the others is in the waiting of region 0
    return places


def _add_peaks(model: Model, case: Case, places: Places, budget_bytes: int, over: list[tuple[int, float]]) -> None:
    """Add P1 to P3."""
    rooms = [room / case.unit for room in case.rooms(budget_bytes)]
    so_far: list[tuple[int, float]] = []
    for index, room in enumerate(rooms[:-1]):
        model.row([*so_far, (places.extra[index], 1.0), *over], high=room)  # P1 and P2
        total = model.variable()
        model.row([(total, 1.0), (places.kept[index], -1.0), *((variable, -one) for variable, one in so_far)], 0.0, 0.0)
        so_far = [(total, 1.0)]
    model.row([*so_far, *over], high=rooms[-1])  # P3


def _add_times(model: Model, case: Case, swapped: list[int], recompute: list[int]) -> tuple[list[int], list[int]]:
    """Add T1 to T4.

    A forward waits for the window. A backward waits for its loads, and has waited for all that ran again before it.
    """
    problem, regions, num = case.problem, case.regions, len(case.regions)
    out_ms, in_ms = case.unit / problem.link.out_bytes_per_ms, case.unit / problem.link.in_bytes_per_ms
    window_ms = problem.window_bytes / problem.link.out_bytes_per_ms
    prefetch_ms = problem.prefetch_bytes / problem.link.in_bytes_per_ms
    forward = [model.variable() for _ in regions]
    offload = [model.variable(-INFINITY) for _ in regions]  # from the region's end
    for index, region in enumerate(regions):
        before = [(forward[index - 1], -1.0)] if index else []
        copy = (swapped[index], -out_ms)
        model.row([(offload[index], 1.0), *before, copy], -region.forward_ms)
        if index:
            span_ms = region.before_ms + region.forward_ms
            model.row([(offload[index], 1.0), (offload[index - 1], -1.0), copy], -span_ms)
            model.row([(forward[index], 1.0), *before], 0.0)
        is_over = problem.turn_is_clear and index == num - 1
        model.row([(forward[index], 1.0), (offload[index], -1.0)], 0.0 if is_over else -window_ms)
    backward = [model.variable() for _ in regions]
    loaded = [model.variable(-INFINITY) for _ in regions]  # from when its backward would start
    for index in reversed(range(num)):
        copy = (swapped[index], -in_ms)
        if index == num - 1:
            model.row([(loaded[index], 1.0), copy], 0.0)
        else:
            after = regions[index + 1]
            span_ms = after.backward_ms + after.after_ms
            model.row([(loaded[index], 1.0), (loaded[index + 1], -1.0), copy], -span_ms)
            model.row([(loaded[index], 1.0), (backward[index + 1], -1.0), copy], -span_ms - prefetch_ms)
            model.row([(backward[index], 1.0), (backward[index + 1], -1.0), (recompute[index + 1], -1.0)], 0.0)
        model.row([(backward[index], 1.0), (loaded[index], -1.0)], 0.0)
    if not problem.turn_is_clear:
        _add_returns(model, case, swapped, forward, offload, loaded)
    return forward, backward


def _add_returns(
    model: Model, case: Case, swapped: list[int], forward: list[int], offload: list[int], loaded: list[int]
) -> None:
    """Add that what is still on its way out when the turn is over cannot come back yet.

    It can be on its way for no longer than the window after its region's end, so this is about the last few regions,
    and about none where the turn is long. Whether a region swaps at all is a whole number: the row holds for those that
    do.
    """
    problem, regions = case.problem, case.regions
    in_ms = case.unit / problem.link.in_bytes_per_ms
    window_ms = problem.window_bytes / problem.link.out_bytes_per_ms
    spans = [0.0, *(region.backward_ms + region.after_ms for region in reversed(regions))]
    starts = list(itertools.accumulate(spans))[:-1][::-1]  # of each backward, from the turn's end
    since_ms = problem.profile.turn.ms
    for index in reversed(range(len(regions))):
        late_ms = window_ms - since_ms
        if late_ms <= 0:
            return
        swaps = model.binary()
        most = _most_bytes(regions[index]) / case.unit
        model.row([(swaps, most), (swapped[index], -1.0)], 0.0)
        terms = [(loaded[index], 1.0), (offload[index], -1.0), (swapped[index], -in_ms), (swaps, -late_ms)]
        model.row([*terms, (forward[-1], 1.0)], -starts[index] - window_ms)
        since_ms += regions[index].before_ms + regions[index].forward_ms


def _most_bytes(region: Region) -> int:
    return sum(op.num_bytes for op in region.ops) + sum(given.value.num_bytes for given in region.inputs)


def add_lone_waits(model: Model, case: Case, places: Places, unmanaged: list[list[int]]) -> None:
    """Add rows that follow from the others, and make the model without whole numbers much tighter.

    In that model a region can be plain to a half and swap twice what the link can take, and would wait for nothing. But
    the link has little to do for a region that is plain, or recomputed whole: what the window left over in forward,
    what the prefetch limit lets come early in backward. So what a region may swap before it waits shrinks with the
    share of it that is managed.
    """
    problem, regions, num = case.problem, case.regions, len(case.regions)
    out_ms, in_ms = case.unit / problem.link.out_bytes_per_ms, case.unit / problem.link.in_bytes_per_ms
    window_ms = problem.window_bytes / problem.link.out_bytes_per_ms
    prefetch_ms = problem.prefetch_bytes / problem.link.in_bytes_per_ms
    left = [model.variable(0.0, window_ms) for _ in regions]  # to be copied when its forward ends
    for index, region in enumerate(regions):
        copy = (places.swapped[index], -out_ms)
        wait, over = [(places.forward_wait[index], 1.0)], [(left[index], 1.0)]
        if index:
            wait.append((places.forward_wait[index - 1], -1.0))
            over.append((left[index - 1], -1.0))
        own_ms, span_ms = region.forward_ms + window_ms, region.before_ms + region.forward_ms
        model.row([*wait, copy, *((variable, -own_ms) for variable in unmanaged[index])], -own_ms)
        idle_ms = span_ms - min(window_ms, span_ms)
        model.row([*wait, *over, copy, *((variable, -idle_ms) for variable in unmanaged[index])], -span_ms)
    early = [model.variable(0.0, prefetch_ms) for _ in regions]  # loaded for those before it when its backward starts
    for index in reversed(range(num)):
        copy = (places.swapped[index], -in_ms)
        wait, ahead = [(places.backward_wait[index], 1.0)], [(early[index], -1.0)]
        if index == num - 1:
            model.row([*wait, *ahead, copy], 0.0)
            continue
        wait.append((places.backward_wait[index + 1], -1.0))
        ahead.append((early[index + 1], 1.0))
        span_ms = regions[index + 1].backward_ms + regions[index + 1].after_ms
        own_ms = span_ms + prefetch_ms
        model.row([*wait, copy, *((variable, -own_ms) for variable in unmanaged[index])], -own_ms)
        idle_ms = span_ms - min(prefetch_ms, span_ms)
        model.row([*wait, *ahead, copy, *((variable, -idle_ms) for variable in unmanaged[index])], -span_ms)

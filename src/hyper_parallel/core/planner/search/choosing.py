"""Windows and decision together: the problem is solved for several windows, and what is found is judged on the
timeline.

The rules of time spread what a region swaps over its forward; on the timeline the real engine has it in the bursts in
which ops make it. The rules are what a solver can state, the timeline is what comes true: which of the answers is
taken, and what a plan predicts, is its word.
"""

from __future__ import annotations

import dataclasses
import time
from typing import NamedTuple

from hyper_parallel.core.planner.model.choices import (
    SWAP,
    Decision,
    RegionBytes,
    bytes_of,
    plain,
    recompute_all,
    save_all,
)
from hyper_parallel.core.planner.model.identity import DeviceKind
from hyper_parallel.core.planner.model.problem import Problem, evaluate, peak, room_for_copies
from hyper_parallel.core.planner.model.profile import Input, ProfiledOp, Region, StepProfile
from hyper_parallel.core.planner.model.timeline import Timeline, run_step
from hyper_parallel.core.planner.search.polishing import polished
from hyper_parallel.core.planner.search.settings import Setting, candidates, swapped_sizes
from hyper_parallel.core.planner.solve.branch import plain_ms
from hyper_parallel.core.planner.solve.solver import BudgetError, Solution, is_small, smallest_peak, solve
from hyper_parallel.core.swap.engine import Limits

_HOST_LEAD_MS = 50.0  # of an accelerator: the host has launched what the device will do by then
_POLISH_SHARE, _POLISH_S = 0.4, 4.0  # of the time, and at most
_BURST_SHARE = 5e-4  # of a step: what is waited for beyond the rules and may be left so; the solver is no more exact
_MOST_WINDOWS = 4  # of the largest storage each: more than that in flight was never of use


class Candidate(NamedTuple):
    """What to do, and what a step takes then.

    Attributes:
        step_ms: on the timeline, if something is swapped
        peak_bytes: by the rules
        over_bytes: how far above the budget the timeline is nevertheless
        gap: how far from the best it may be, by the rules and for its own windows
    """

    decision: Decision
    setting: Setting
    step_ms: float
    peak_bytes: int
    over_bytes: int
    gap: float


def choose(
    profile: StepProfile,
    budget_bytes: int,
    *,
    margin_bytes: int = 0,
    copies_meet: bool = False,
    time_limit_s: float = 10.0,
) -> Candidate:
    """The fastest step within a budget. `copies_meet`: see P4.

    Raises:
        BudgetError: nothing fits; it names the smallest peak that does.
    """
    end = time.monotonic() + time_limit_s
    polish_s = min(time_limit_s * _POLISH_SHARE, _POLISH_S)
    until = end - polish_s
    variants = _variants(profile)
    found: list[Candidate] = []
    errors: list[BudgetError] = []
    longest_s, has_bursts = 0.0, False
    for number, variant in enumerate(variants):
        begin = time.monotonic()
        if found and until - begin < longest_s:
            break
        if found and variant.is_for_bursts and not has_bursts:
            continue
        problem = problem_of(profile, budget_bytes, variant.setting, margin_bytes, copies_meet)
        try:
            solution = solve(variant.of(problem), time_limit_s=max(until - begin, 0.0) / (len(variants) - number))
        except BudgetError as error:
            if variant.room == 1.0:  # else it speaks of a budget that nobody gave
                errors.append(error.with_traceback(None))  # see below
            continue
        found.append(_judged(profile, problem, solution.decision, solution.gap))
        longest_s = max(longest_s, time.monotonic() - begin)
        has_bursts |= _has_bursts(found[-1], solution)
        is_simple = is_small(profile) or _is_cpu(profile)
        if is_simple and any(each.swaps for each in solution.decision) and not has_bursts:
            break
    if overhead_ms(profile) > 0 and (simple := unmanaged(profile, budget_bytes, margin_bytes)) is not None:
        found.append(simple)
    if not found:
        try:
            raise min(errors, key=lambda error: error.smallest_bytes)
        finally:
            errors.clear()  # an error that its own frames hold would hold the batch as well, until garbage is collected
    best = min(found, key=lambda each: (each.over_bytes > 0, each.step_ms, each.setting.in_flight_bytes))
    # To a CPU, whose link are files, the timeline's bursts mean little.
    is_worth_it = has_bursts and any(each.swaps for each in best.decision) and not _is_cpu(profile)
    if copies_meet or best.over_bytes or not is_worth_it:
        return best
    others = [each.decision for each in found]
    return _polished(profile, budget_bytes, margin_bytes, best, others, min(time.monotonic() + polish_s, end))


def _is_cpu(profile: StepProfile) -> bool:
    return profile.device_kind is DeviceKind.CPU


def overhead_ms(profile: StepProfile) -> float:
    """What a region costs beside the ops that it runs again: where the host is the slower one, its own Python."""
    return 0.0 if profile.host is None else profile.host.region_ms


def overhead_without_copies_ms(profile: StepProfile) -> float:
    """The same in a plan that swaps nothing: its regions need not watch every op of a forward that they have seen."""
    if profile.host is None or profile.host.without_copies_ms is None:
        return overhead_ms(profile)
    return profile.host.without_copies_ms


def unmanaged(profile: StepProfile, budget_bytes: int, margin_bytes: int) -> Candidate | None:
    """Blocks that are left alone or recomputed whole: the framework's own checkpoint does that, and costs no overhead.

    None: too large.
    """
    regions = profile.regions
    problem = Problem(profile, budget_bytes, 0, 0, margin_bytes=margin_bytes)
    decision = [recompute_all(region) for region in regions]
    loads = [bytes_of(region, each) for region, each in zip(regions, decision, strict=True)]
    if peak(problem, loads).num_bytes > budget_bytes:
        return None
    # What the last regions keep is there at the highest point in any case; then those that save most time for their
    # bytes.
    order = sorted(
        range(len(regions)),
        key=lambda index: (-loads[index].recompute_ms / max(regions[index].residual_bytes, 1), -index),
    )
    for index in [len(regions) - 1, *order]:
        before = decision[index], loads[index]
        decision[index] = plain(regions[index])
        loads[index] = bytes_of(regions[index], decision[index])
        if not regions[index].may_be_plain or peak(problem, loads).num_bytes > budget_bytes:
            decision[index], loads[index] = before
    cost = evaluate(dataclasses.replace(problem, margin_bytes=0), tuple(decision))
    return Candidate(tuple(decision), candidates(profile)[-1], cost.step_ms, cost.peak_bytes, 0, 0.0)


def _polished(
    profile: StepProfile, budget_bytes: int, margin_bytes: int, best: Candidate, others: list[Decision], until: float
) -> Candidate:
    """The best that was found, or a faster one near it; see `polishing`."""
    # Windows may become as small as the largest storage that is swapped: by how much they help is the timeline's word.
    sizes = [size for decision in others for size in _sizes_in(profile, decision)]
    least = Setting(max(sizes), max(sizes))
    problem = problem_of(profile, budget_bytes, least, margin_bytes)

    def judge(decision: Decision, loads: list[RegionBytes], below_ms: float) -> float | None:
        managed_ms = problem.region_overhead_ms * sum(each.is_managed for each in loads)
        if plain_ms(problem) + managed_ms + sum(each.recompute_ms for each in loads) >= below_ms:
            return None
        if peak(problem, loads, swaps=True).num_bytes > budget_bytes:
            return None
        found = _judged(profile, problem, decision, best.gap)
        return None if found.over_bytes else found.step_ms

    decision = polished(profile, best.decision, best.step_ms, judge, until, others)
    return best if decision == best.decision else _judged(profile, problem, decision, best.gap)


def _has_bursts(candidate: Candidate, solution: Solution) -> bool:
    """Whether the step waits for what the rules do not see: then another answer may be better, though by the rules it
    is not.
    """
    return candidate.step_ms > solution.cost.step_ms * (1 + _BURST_SHARE)


class _Variant(NamedTuple):
    """What the solver is told: windows, and shares of the link and of the room above the base.

    An answer that leaves a part of the link free waits less for bursts, and one that leaves a part of the room has
    wider windows.
    """

    setting: Setting
    link: float = 1.0
    room: float = 1.0

    @property
    def is_for_bursts(self) -> bool:
        return self.link < 1.0 or self.room < 1.0

    def of(self, problem: Problem) -> Problem:
        profile, link = problem.profile, problem.profile.link
        if link is not None and self.link < 1.0:
            slower = dataclasses.replace(link, out_bytes_per_ms=link.out_bytes_per_ms * self.link)
            profile = dataclasses.replace(profile, link=slower)
        room = int((problem.budget_bytes - profile.base_bytes) * self.room)
        return dataclasses.replace(problem, profile=profile, budget_bytes=profile.base_bytes + room)


def _variants(profile: StepProfile) -> list[_Variant]:
    """The most promising first: for a large problem there may be no time for all."""
    large, *others = candidates(profile)
    whole = [_Variant(setting) for setting in (large, *others)]
    if is_small(profile) or _is_cpu(profile) or not others:
        return whole
    one = others[0]
    first = [whole[0], _Variant(large, room=0.95), _Variant(large, 0.9, 0.97), _Variant(one, 0.95, 0.95)]
    return [*first, *whole[1:], _Variant(large, 0.75), _Variant(large, 0.9)]


def smallest_budget(profile: StepProfile, margin_bytes: int) -> int:
    """The smallest budget that can be met."""
    problems = (problem_of(profile, 0, setting, margin_bytes) for setting in candidates(profile))
    return min(smallest_peak(problem)[1].peak_bytes for problem in problems)


def problem_of(
    profile: StepProfile, budget_bytes: int, setting: Setting, margin_bytes: int, copies_meet: bool = False
) -> Problem:
    """The problem in which nothing is swapped that is larger than the windows: it would pass alone, and the promise be
    broken.
    """
    most = min(setting.window_bytes, setting.prefetch_bytes)
    if max(swapped_sizes(profile), default=0) > most:
        profile = dataclasses.replace(profile, regions=tuple(_without_large(each, most) for each in profile.regions))
    return Problem(
        profile,
        budget_bytes,
        setting.window_bytes,
        setting.prefetch_bytes,
        region_overhead_ms=overhead_ms(profile),
        margin_bytes=margin_bytes,
        copies_meet=copies_meet,
        turn_is_clear=_tells_engine(profile),
    )


def _tells_engine(profile: StepProfile) -> bool:
    """Whether the engine hears of the last region, which swaps nothing: by residuals of its ops."""
    if not profile.abilities.turn_is_clear:
        return False
    last = profile.regions[-1]
    return not last.may_swap and any(op.residual_bytes for op in last.ops)


def _without_large(region: Region, most_bytes: int) -> Region:
    def smaller(op: ProfiledOp) -> ProfiledOp:
        others = tuple(choice for choice in op.choices if choice != SWAP)
        is_large = any(value.num_bytes > most_bytes for value in op.makes)
        return dataclasses.replace(op, choices=others) if is_large and others else op

    def smaller_input(each: Input) -> Input:
        return dataclasses.replace(each, may_swap=each.may_swap and each.value.num_bytes <= most_bytes)

    return dataclasses.replace(
        region, ops=tuple(map(smaller, region.ops)), inputs=tuple(map(smaller_input, region.inputs))
    )


def _judged(profile: StepProfile, problem: Problem, decision: Decision, gap: float) -> Candidate:
    setting = Setting(problem.window_bytes, problem.prefetch_bytes)
    swaps = profile.link is not None and any(each.swaps for each in decision)
    if swaps:
        setting = _widened(problem, decision)
    cost = evaluate(
        dataclasses.replace(
            problem, window_bytes=setting.window_bytes, prefetch_bytes=setting.prefetch_bytes, margin_bytes=0
        ),
        decision,
    )
    if not swaps:
        return Candidate(decision, setting, cost.step_ms, cost.peak_bytes, 0, gap)
    timeline = timeline_under(profile, decision, setting)
    over_bytes = max(timeline.peak_bytes - problem.budget_bytes, 0)
    step_ms = timeline.step_ms + problem.region_overhead_ms * sum(each.is_managed for each in decision)
    return Candidate(decision, setting, step_ms, cost.peak_bytes, over_bytes, gap)


def _sizes_in(profile: StepProfile, decision: Decision) -> list[int]:
    """Of the storages that are swapped."""
    sizes = []
    for region, chosen in zip(profile.regions, decision, strict=True):
        sizes += [
            v.num_bytes for op, choice in zip(region.ops, chosen.ops, strict=True) if choice == SWAP for v in op.makes
        ]
        sizes += [
            each.value.num_bytes for each, choice in zip(region.inputs, chosen.inputs, strict=True) if choice == SWAP
        ]
    return sizes


def timeline_under(profile: StepProfile, decision: Decision, setting: Setting) -> Timeline:
    """The step that a candidate is judged by, moment by moment."""
    if _tells_engine(profile) and decision[-1].is_plain and any(each.swaps for each in decision):
        decision = (*decision[:-1], save_all(profile.regions[-1]))  # as it is run then: the engine hears of it
    return run_step(
        profile,
        decision,
        Limits(setting.window_bytes, setting.prefetch_bytes),
        min_bytes=profile.min_swap_bytes,
        host_lead_ms=0.0 if _is_cpu(profile) else _HOST_LEAD_MS,
        ahead_bytes=setting.ahead_bytes,
    )


def _widened(problem: Problem, decision: Decision) -> Setting:
    """The windows with what the budget leaves: room that nobody uses is of use to copies."""
    if problem.copies_meet:
        return Setting(problem.window_bytes, problem.prefetch_bytes)
    loads = [bytes_of(region, chosen) for region, chosen in zip(problem.profile.regions, decision, strict=True)]
    most = _MOST_WINDOWS * max(swapped_sizes(problem.profile), default=0)
    window, *ahead = (min(room, most) for room in room_for_copies(problem, loads))
    ahead = [max(room, problem.prefetch_bytes) for room in ahead]
    by_region = tuple(ahead) if problem.profile.abilities.loads_by_region else ()
    return Setting(max(window, problem.window_bytes), min(ahead), by_region)

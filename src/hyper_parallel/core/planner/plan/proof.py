"""A plan for a budget, proved by real steps.

The solver's plan is run on the model, and made more careful until it keeps its promise.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel._base.log import get_logger
from hyper_parallel.core.planner.model.abilities import HostCost
from hyper_parallel.core.planner.model.choices import RECOMPUTE, plain, recompute_all
from hyper_parallel.core.planner.model.problem import Problem, evaluate
from hyper_parallel.core.planner.model.profile import Region, StepProfile
from hyper_parallel.core.planner.plan.backend import Batch, PlannerBackend, ProfiledModel
from hyper_parallel.core.planner.plan.plan import Measured, MemoryPlan, Predicted
from hyper_parallel.core.planner.search.choosing import choose, overhead_ms, overhead_without_copies_ms, unmanaged
from hyper_parallel.core.planner.search.settings import candidates
from hyper_parallel.core.planner.solve.refusal import BudgetError, advice, blocks_words
from hyper_parallel.core.swap.sizes import format_size
from hyper_parallel.platform.opaque import Module

_logger = get_logger("planner")
_KIB = 1024
_NUM_TURNS = 3
_MAX_TRIES = 5  # of solving again with what was measured
_TOO_SLOW = 1.04  # real steps to predicted ones: more than what clocks and temperature do
_NEAR = 1.02  # of two measured plans: which is the faster may be otherwise tomorrow
# Where all regions together take the host more than this share of a step, steps of one plan were seen to differ by so
# much within minutes.
_HOST_SHARE, _HOST_DRIFT = 0.05, 1.1


def planned(
    profile: StepProfile, allowed_bytes: int, profiled: ProfiledModel | None, *, names_smallest: bool = True
) -> MemoryPlan:
    """Make the plan for a budget, and prove it if there is a real model.

    Raises:
        BudgetError: nothing fits; the smallest peak it names was proved as well, if there is a model, unless
            `names_smallest` says that nobody wants to know. Then nobody wants to know how fast the plan is either.
    """
    times = names_smallest
    try:
        plan = solved(profile, allowed_bytes, margin_bytes=first_margin(profile))
        if profiled is None or (plan.is_empty and profile.is_plain_measured):
            return plan
        simplest = _recomputed(profile, allowed_bytes, profiled, faster_than_ms=plan.predicted.step_ms, times=times)
        return _fastest(_proved(plan, profiled, times=times), profiled) if simplest is None else simplest
    except BudgetError as error:
        simplest = None if profiled is None else _recomputed(profile, allowed_bytes, profiled, times=times)
        if simplest is not None:
            return simplest
        if not names_smallest:
            raise
        plain_bytes = profile.peak_bytes if profile.is_plain_measured else math.inf
        smallest, where = error.smallest_bytes, error.where
        if profiled is not None and smallest < plain_bytes:
            smallest = _proved_smallest(profile, profiled, smallest)
        if plain_bytes <= smallest:  # it was seen, and so needs no margin
            smallest = profile.peak_bytes
            parts = format_size(profile.activation_peak_bytes), format_size(profile.base_bytes)
            where = "the plain step: {} of activations, {} alive when forward begins".format(*parts)
        raise BudgetError(
            error.what,
            smallest_bytes=smallest,
            peak=error.peak,
            expected=f"a budget of at least {smallest} bytes ({format_size(smallest)}) with these blocks",
            got=f"{allowed_bytes} ({format_size(allowed_bytes)})",
            where="; ".join(filter(None, (where, blocks_words(profile)))),
            do=advice(profile, allowed_bytes, error.peak, None if profiled is None else profiled.suggested_blocks),
        ) from None


def _recomputed(
    profile: StepProfile,
    allowed_bytes: int,
    profiled: ProfiledModel,
    *,
    faster_than_ms: float = math.inf,
    times: bool = True,
) -> MemoryPlan | None:
    """Prove the plan that recomputes every block, if it is predicted to be faster.

    No rule and no margin shall refuse what needs no more memory than a real step shows.
    """
    decision = tuple(recompute_all(region) for region in profile.regions)
    cost = evaluate(Problem(profile, allowed_bytes, 0, 0), decision)
    if cost.step_ms >= faster_than_ms or cost.peak_bytes - allowed_bytes > profile.activation_peak_bytes // 20:
        return None
    predicted = Predicted(cost.peak_bytes, cost.step_ms)
    plan = MemoryPlan(profile, decision, candidates(profile)[0], allowed_bytes, predicted)
    return _within(plan, profiled, times=times)


def _within(plan: MemoryPlan, profiled: ProfiledModel, *, times: bool = True) -> MemoryPlan | None:
    """Measure real steps under the plan, and give it back if they keep its budget."""
    plan.measured = _measured(plan, profiled, times=times)
    return None if plan.measured is None or plan.measured.peak_bytes > plan.budget_bytes else plan


def _fastest(plan: MemoryPlan, profiled: ProfiledModel) -> MemoryPlan:
    """Take the plan, or a faster one, as real steps say.

    Rules do not tell where the host is the slower one. So other plans are tried only where the profile says how much
    that is (`host`), be it 0.
    """
    rivals = [plan]
    is_known = plan.profile.host is not None
    if not is_known or _taken_ms(plan) == math.inf or all(chosen.is_plain for chosen in plan.decision):
        return plan
    is_slow = _taken_ms(plan) > plan.predicted.step_ms * _TOO_SLOW and any(
        chosen.is_managed for chosen in plan.decision
    )
    if is_slow:
        rivals += _with_costlier_regions(plan, profiled)
    if overhead_ms(plan.profile) > 0 or (is_slow and plan.has_swaps):
        rivals += _without_copies(plan, profiled, faster_than_ms=min(map(_taken_ms, rivals)))
    fastest = min(rivals, key=_taken_ms)
    return _steady(fastest, rivals, profiled) or fastest


def _steady(fastest: MemoryPlan, rivals: Sequence[MemoryPlan], profiled: ProfiledModel) -> MemoryPlan | None:
    """Find a plan that is hardly slower and asks the host for less; None: there is none, or no reason for one.

    No plan shall be slower than recomputing every block: not by what its copies and its Python may take, nor if the
    host is busier tomorrow. Where it may come to that, a plan counts as slower only if it is so by more than the host
    may drift.
    """
    if not any(chosen.is_managed for chosen in fastest.decision):
        return None
    profile, budget = fastest.profile, fastest.budget_bytes
    whole_ms = evaluate(Problem(profile, budget, 0, 0), tuple(map(recompute_all, profile.regions))).step_ms
    region_ms = overhead_ms(profile) if fastest.has_swaps else overhead_without_copies_ms(profile)
    host_ms = region_ms * len(profile.regions)
    may_be_slower = host_ms > _HOST_SHARE * profile.step_ms and _taken_ms(fastest) * _HOST_DRIFT > whole_ms
    limit_ms = _taken_ms(fastest) * (_HOST_DRIFT if may_be_slower else _NEAR)
    plan, choice = None, unmanaged(profile, budget, first_margin(profile))
    if choice is not None:
        if choice.step_ms > limit_ms:
            return None
        plan = next((rival for rival in rivals if rival.decision == choice.decision), None)
        if plan is None:
            predicted = Predicted(choice.peak_bytes, choice.step_ms)
            plan = _within(MemoryPlan(profile, choice.decision, choice.setting, budget, predicted), profiled)
    if plan is None:  # none by the rules, or none that keeps the budget
        plan = _recomputed(profile, budget, profiled, faster_than_ms=limit_ms)
    return plan if plan is not None and _taken_ms(plan) <= limit_ms else None


def _with_costlier_regions(plan: MemoryPlan, profiled: ProfiledModel) -> list[MemoryPlan]:
    """Plan again for an accelerator that was seen to wait for the host.

    What steps take beyond the predicted time is put down to the regions. Solved again with that, a plan has fewer of
    them.
    """
    taken_ms = _taken_ms(plan)
    more_ms = (taken_ms - plan.predicted.step_ms) / sum(chosen.is_managed for chosen in plan.decision)
    host = dataclasses.replace(plan.profile.host or HostCost(0.0), region_ms=overhead_ms(plan.profile) + more_ms)
    profile = dataclasses.replace(plan.profile, host=host)
    _logger.info("steps take %.0f ms, predicted were %.0f; planning again", taken_ms, plan.predicted.step_ms)
    with contextlib.suppress(BudgetError):
        other = solved(profile, plan.budget_bytes, margin_bytes=first_margin(profile))
        if other.predicted.step_ms < taken_ms:
            return [_proved(other, profiled)]
    return []


def _without_copies(plan: MemoryPlan, profiled: ProfiledModel, *, faster_than_ms: float) -> list[MemoryPlan]:
    """Plan with regions that save and recompute, which cost the host less than those that swap.

    Where the profile has not timed these they count as if they cost nothing: it timed regions that recompute
    everything, and these run fewer ops again. What a step takes is then the prediction, too.
    """
    profile = plan.profile
    region_ms = None if profile.host is None else profile.host.without_copies_ms
    regions = profile.regions
    if region_ms is not None:
        regions = tuple(map(_keeping_residuals_only, regions))
    margin = first_margin(profile)
    with contextlib.suppress(BudgetError):
        other = dataclasses.replace(profile, host=HostCost(region_ms or 0.0, region_ms), regions=regions)
        free = solved(other, plan.budget_bytes, margin_bytes=margin, swaps=False)
        if free.predicted.step_ms >= faster_than_ms:
            return []
        rival = MemoryPlan(profile, free.decision, free.setting, plan.budget_bytes, free.predicted, gap=free.gap)
        rival = _proved(rival, profiled)
        rival.predicted = dataclasses.replace(rival.predicted, step_ms=_taken_ms(rival))
        return [rival]
    return []


def _keeping_residuals_only(region: Region) -> Region:
    """Take from the region the choice to keep what autograd does not: a forward that is not watched cannot."""
    ops = [
        op if op.is_needed or RECOMPUTE not in op.choices else dataclasses.replace(op, choices=(RECOMPUTE,))
        for op in region.ops
    ]
    return dataclasses.replace(region, ops=tuple(ops))


def _taken_ms(plan: MemoryPlan) -> float:
    return math.inf if plan.measured is None or plan.measured.step_ms is None else plan.measured.step_ms


def _proved_smallest(profile: StepProfile, profiled: ProfiledModel, smallest_bytes: int) -> int:
    """Find the smallest budget for which a plan was seen to keep it."""
    for _ in range(_MAX_TRIES):
        try:
            _proved(solved(profile, smallest_bytes, margin_bytes=first_margin(profile)), profiled, times=False)
        except BudgetError as error:
            if error.smallest_bytes == 0:  # the device has not even that
                break
            smallest_bytes = max(error.smallest_bytes, smallest_bytes + smallest_bytes // 200)
        else:
            break
    return smallest_bytes


def solved(
    profile: StepProfile,
    allowed_bytes: int,
    *,
    margin_bytes: int,
    copies_meet: bool = False,
    swaps: bool = True,
    time_limit_s: float = 10.0,
) -> MemoryPlan:
    """Solve for the plan with the least predicted time within a budget.

    It is pure: the same profile gives the same plan.

    Args:
        copies_meet: see P4.
        swaps: False leaves swapping out.

    Raises:
        BudgetError: nothing fits.
    """
    plain_decision = tuple(plain(region) for region in profile.regions)
    if profile.peak_bytes <= allowed_bytes and profile.is_plain_measured:
        predicted = Predicted(profile.peak_bytes, profile.step_ms)
        return MemoryPlan(profile, plain_decision, candidates(profile)[0], allowed_bytes, predicted)
    # Where the plain step was seen to run out of memory, no room above what it would take is of any use: the margin
    # counts from there.
    chosen = choose(
        profile if swaps else dataclasses.replace(profile, link=None),
        min(allowed_bytes, profile.peak_bytes),
        margin_bytes=margin_bytes,
        copies_meet=copies_meet,
        time_limit_s=time_limit_s,
    )
    pairs = zip(profile.regions, chosen.decision, strict=True)
    notes = sum(region.note_bytes for region, decision in pairs if not decision.is_plain)
    predicted = Predicted(chosen.peak_bytes + notes, chosen.step_ms)  # without the margin
    return MemoryPlan(profile, chosen.decision, chosen.setting, allowed_bytes, predicted, gap=chosen.gap)


def verified(
    plan: MemoryPlan, planner: PlannerBackend, model: Module, batch: Batch, loss_fn: Callable[[Any], Any] | None
) -> MemoryPlan:
    """Prove a plan anew, as `MemoryPlan.verify` says."""
    profile = plan.profile
    profiled = planner.profiled(
        model, batch, loss_fn, regions=profile.identity.blocks, keeps_output=bool(profile.keeps_output)
    )
    plan.check(model, batch)
    with profiled.preserved() as block, block:
        profiled.look_for_writes()
        proved = _proved(plan, profiled)
        time_by_turns(proved, profiled)
    return proved


def time_by_turns(plan: MemoryPlan, profiled: ProfiledModel) -> None:
    """Time steps under a proved plan and plain ones by turns, where proving has timed none.

    That is on a CPU, whose speed changes with what else it does. Nothing is decided by it: it is shown beside what was
    predicted. Ranks that plan together would have to take as many steps each, so not there.
    """
    measured = plan.measured
    if measured is None or measured.step_ms is not None or not (profiled.is_alone and plan.profile.is_plain_measured):
        return
    plain_ms, under_ms = [], []
    for _ in range(_NUM_TURNS):
        plain_ms.append(profiled.step_ms(1))
        plan.attach(profiled.model, "error")
        try:
            profiled.step_ms(1)  # the first step of a plan looks at everything
            under_ms.append(profiled.step_ms(1))
        finally:
            plan.detach(profiled.model)
    times = statistics.median(under_ms), statistics.median(plain_ms)
    plan.measured = dataclasses.replace(measured, step_ms=times[0], plain_step_ms=times[1])


def _proved(plan: MemoryPlan, profiled: ProfiledModel, *, times: bool = True) -> MemoryPlan:
    """Prove the plan, or a more careful one, whose real peak is within the budget."""
    margin, peak_bytes = first_margin(plan.profile), None
    careful: list[dict[str, bool]] = [{"copies_meet": True}, {"swaps": False}]  # what is left to try
    ways: dict[str, bool] = {}
    for tried in range(_MAX_TRIES):
        measured = _measured(plan, profiled, times=times)
        peak_bytes = None if measured is None else measured.peak_bytes
        if peak_bytes is not None and peak_bytes <= plan.budget_bytes:
            plan.measured = measured
            return plan
        # What was not foreseen is added to the margin, and a little more: it will not be quite the same next time.
        # Where memory ran out nobody knows how much that was.
        if peak_bytes is None:
            margin += (min(plan.budget_bytes, plan.profile.peak_bytes) - plan.base_bytes) * 2**tried // 16
            _logger.info("a step ran out of memory; planning again")
        else:
            margin += int((peak_bytes - plan.budget_bytes) * 1.25) + 4 * _KIB
            _logger.info(
                "a step took %s more than planned; planning again", format_size(peak_bytes - plan.budget_bytes)
            )
        while True:
            try:
                plan = solved(plan.profile, plan.budget_bytes, margin_bytes=margin, **ways)
                break
            except BudgetError:
                # A margin for what copies did is none that others need: those that count them twice (P4), and those
                # that make none.
                if not careful or not any(chosen.swaps for chosen in plan.decision):
                    raise
                ways, margin = careful.pop(0), first_margin(plan.profile)
    raise BudgetError(
        "The plan does not keep its promise on the real model.",
        smallest_bytes=peak_bytes or 0,
        expected=f"a peak of at most {format_size(plan.budget_bytes)}",
        got="not enough memory for a step" if peak_bytes is None else format_size(peak_bytes),
        do="Raise the budget, or plan with a batch like those that training has.",
    )


def _measured(plan: MemoryPlan, profiled: ProfiledModel, *, times: bool = True) -> Measured | None:
    """Run real steps under a plan; if they keep the budget, some more for their time, where it tells anything.

    None: memory ran out.
    """
    plan.apply(profiled.model)
    try:
        above_bytes = profiled.peaks_within(2, num_before=1)  # which teaches the engine what is asked for first
        if above_bytes is None:
            return None
        peak_bytes = above_bytes + plan.profile.base_bytes
        if not times or not profiled.tells_time or peak_bytes > plan.budget_bytes:
            return Measured(peak_bytes)
        step_ms = profiled.step_ms_within()
        return None if step_ms is None else Measured(peak_bytes, step_ms)
    finally:
        plan.remove(profiled.model)


def first_margin(profile: StepProfile) -> int:
    """Count what no rule foresees: what regions hold beside their values, sizes that allocators round up, and a
    thousandth.

    The thousandth is for what differs from step to step.
    """
    notes = sum(region.note_bytes for region in profile.regions)
    return notes + 16 * _KIB + profile.activation_peak_bytes // 1000

"""Which windows and which answer a plan takes."""

from __future__ import annotations

import dataclasses

import pytest

from hyper_parallel.core.planner.model.abilities import Abilities, HostCost
from hyper_parallel.core.planner.model.choices import SWAP, bytes_of, recompute_all
from hyper_parallel.core.planner.model.problem import Problem, evaluate, peak
from hyper_parallel.core.planner.model.timeline import run_step
from hyper_parallel.core.planner.search import choosing
from hyper_parallel.core.planner.search.choosing import choose, problem_of, smallest_budget
from hyper_parallel.core.planner.search.settings import Setting, candidates, swapped_sizes
from hyper_parallel.core.planner.solve.solver import BudgetError
from hyper_parallel.core.swap.engine import Limits
from support.planner_cases import NO_HURRY, op, problem, random_problem, region, transformer

BUDGETS = (0.1, 0.2, 0.4, 0.7)


def budget_of(profile: object, share: float) -> int:
    return profile.base_bytes + int(profile.activation_peak_bytes * share)  # type: ignore[attr-defined]


@pytest.mark.parametrize("share", BUDGETS)
def test_what_is_chosen_is_within_the_budget_with_its_own_windows(share: float) -> None:
    profile = transformer(6, differ=False)
    budget = max(budget_of(profile, share), smallest_budget(profile, 0))
    found = choose(profile, budget, time_limit_s=NO_HURRY)
    loads = [bytes_of(one, chosen) for one, chosen in zip(profile.regions, found.decision, strict=True)]
    windows = found.setting.window_bytes, found.setting.prefetch_bytes
    assert peak(Problem(profile, budget, *windows), loads).num_bytes <= budget


def test_each_region_leaves_to_the_loads_of_others_what_it_does_not_need_itself() -> None:
    profile = transformer(6, differ=False)
    profile = dataclasses.replace(profile, abilities=Abilities(loads_by_region=True))
    budget = budget_of(profile, 0.4)
    found = choose(profile, budget, time_limit_s=NO_HURRY)
    ahead, loads = (
        found.setting.ahead_bytes,
        [bytes_of(*each) for each in zip(profile.regions, found.decision, strict=True)],
    )
    assert any(each.swaps for each in found.decision)
    assert min(ahead) == found.setting.prefetch_bytes
    kept = 0
    for one, each, room in zip(profile.regions, loads, ahead, strict=True):
        needed = profile.base_bytes + one.outside_bytes + kept + one.backward_peak_bytes + each.extra_bytes
        assert needed + room <= budget or room == found.setting.prefetch_bytes
        kept += each.kept_bytes
    assert ahead[0] >= ahead[-1], "less is kept by those before it"


def test_windows_get_what_the_budget_leaves_and_no_more_than_is_of_use() -> None:
    profile = transformer(6, differ=False)
    found = choose(profile, budget_of(profile, 0.4), time_limit_s=NO_HURRY)
    assert any(SWAP in (*each.ops, *each.inputs) for each in found.decision)
    largest = max(swapped_sizes(profile))
    assert max(found.setting.window_bytes, found.setting.prefetch_bytes) <= 4 * largest
    assert found.setting >= min(candidates(profile))


@pytest.mark.parametrize("share", BUDGETS)
def test_it_is_not_slower_than_recomputing_every_block(share: float) -> None:
    profile = transformer(6, differ=True)
    decision = tuple(map(recompute_all, profile.regions))
    checkpointed = evaluate(Problem(profile, 0, 0, 0), decision)
    if checkpointed.peak_bytes <= budget_of(profile, share):
        assert choose(profile, budget_of(profile, share), time_limit_s=NO_HURRY).step_ms <= checkpointed.step_ms * (
            1 + 1e-9
        )


def test_the_time_is_that_of_the_timeline_where_something_is_swapped() -> None:
    profile = transformer(6, differ=False)
    found = choose(profile, budget_of(profile, 0.4), time_limit_s=NO_HURRY)
    limits = Limits(found.setting.window_bytes, found.setting.prefetch_bytes)
    timeline = run_step(profile, found.decision, limits, host_lead_ms=50.0)
    assert found.step_ms == timeline.step_ms


def test_nothing_larger_than_a_window_is_swapped() -> None:
    profile = transformer(3, differ=False)
    small = sorted(swapped_sizes(profile))[0]
    given = problem_of(profile, 0, Setting(small, small), 0).profile
    assert swapped_sizes(given) == {small}
    assert problem_of(profile, 0, Setting(1 << 50, 1 << 50), 0).profile is profile


def test_a_storage_that_can_only_be_swapped_keeps_its_choice() -> None:
    given = problem(region(op(10, choices=("swap",)), may_be_plain=False)).profile
    assert problem_of(given, 0, Setting(1, 1), 0).profile.regions[0].ops[0].choices == ("swap",)


def test_the_smallest_budget_can_be_met_and_one_byte_less_cannot() -> None:
    for seed in range(60):
        given = random_problem(seed)
        try:
            smallest = smallest_budget(given.profile, 0)
        except Exception:  # noqa: S112 - some have no decision at all; see test_solver
            continue
        if not given.profile.regions:
            continue
        assert choose(given.profile, smallest, time_limit_s=NO_HURRY)
        with pytest.raises(BudgetError) as caught:
            choose(dataclasses.replace(given.profile), smallest - 1, time_limit_s=NO_HURRY)
        assert caught.value.smallest_bytes == smallest, seed


def test_where_regions_cost_the_host_much_blocks_are_left_alone_or_recomputed_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choosing, "_POLISH_S", NO_HURRY)
    profile = transformer(3, differ=False)
    budget = budget_of(profile, 0.6)
    found = {}
    for overhead_ms in (0.0, 0.01, 50.0):
        given = dataclasses.replace(profile, host=HostCost(overhead_ms))
        found[overhead_ms] = choose(given, budget, time_limit_s=NO_HURRY)
    assert any(each.swaps for each in found[0.0].decision)
    assert any(each.swaps for each in found[0.01].decision), "a little overhead is no reason"
    assert found[0.0].step_ms < found[0.01].step_ms
    expensive = found[50.0]
    whole = [recompute_all(region) for region in profile.regions]
    assert all(each.is_plain or each == again for each, again in zip(expensive.decision, whole, strict=True))
    assert 0 < sum(each.is_plain for each in expensive.decision) < 3
    loads = [bytes_of(*each) for each in zip(profile.regions, expensive.decision, strict=True)]
    assert peak(Problem(profile, budget, 0, 0), loads).num_bytes <= budget


@pytest.mark.parametrize("share", BUDGETS)
def test_with_any_overhead_it_is_not_slower_than_recomputing_every_block(share: float) -> None:
    profile = transformer(5, differ=True)
    given = dataclasses.replace(profile, host=HostCost(7.0))
    checkpointed = evaluate(Problem(profile, 0, 0, 0), tuple(map(recompute_all, profile.regions)))
    if checkpointed.peak_bytes <= budget_of(profile, share):
        assert choose(given, budget_of(profile, share), time_limit_s=NO_HURRY).step_ms <= checkpointed.step_ms * (
            1 + 1e-9
        )

"""A choice made better on the timeline: nothing but what a judge allows, and the best that exchanges and copies lead to."""

from __future__ import annotations

import time
from typing import Any

from hyper_parallel.core.planner.model.choices import RegionBytes, RegionDecision, plain, recompute_all
from hyper_parallel.core.planner.search.polishing import polished
from support.planner_cases import transformer


def mixed(regions: Any) -> tuple[RegionDecision, ...]:
    return tuple((recompute_all, plain)[index % 2](each) for index, each in enumerate(regions))


def test_it_goes_on_until_no_copy_and_no_exchange_is_better() -> None:
    profile = transformer(6, differ=False)
    saved, again = plain(profile.regions[0]), recompute_all(profile.regions[0])
    best = (again, saved, again, saved, saved, again)

    def judge(decision: Any, loads: list[RegionBytes], below_ms: float = 0.0) -> float:
        return 10.0 + sum(one != other for one, other in zip(decision, best, strict=True))

    start = (saved, again, saved, again, again, saved)
    assert polished(profile, start, judge(start, []), judge, time.monotonic() + 60) == best


def test_what_the_judge_refuses_is_not_taken() -> None:
    profile = transformer(4, differ=False)
    start = mixed(profile.regions)
    assert polished(profile, start, 5.0, lambda decision, loads, below_ms: None, time.monotonic() + 60) == start
    assert polished(profile, start, 5.0, lambda decision, loads, below_ms: 5.0, time.monotonic() + 60) == start


def test_it_asks_about_each_decision_once_with_the_loads_of_its_regions() -> None:
    profile = transformer(5, differ=False)
    asked: list[Any] = []

    def judge(decision: Any, loads: list[RegionBytes], below_ms: float = 0.0) -> float:
        assert [each.is_managed for each in loads] == [each.is_managed for each in decision]
        asked.append(decision)
        return 5.0 - len(asked) * 1e-3

    polished(profile, mixed(profile.regions), 5.0, judge, time.monotonic() + 60)
    assert len(asked) == len(set(asked)) > 5


def test_when_the_time_is_up_nothing_is_asked() -> None:
    profile = transformer(5, differ=False)
    start = mixed(profile.regions)
    assert polished(profile, start, 5.0, lambda decision, loads, below_ms: 1.0, time.monotonic()) == start


def test_regions_that_differ_keep_what_they_do() -> None:
    profile = transformer(4, differ=True)
    asked: list[Any] = []

    def judge(decision: Any, loads: list[RegionBytes], below_ms: float = 0.0) -> None:
        asked.append(decision)

    polished(profile, mixed(profile.regions), 5.0, judge, time.monotonic() + 60)
    for decision in asked:
        for region, chosen in zip(profile.regions, decision, strict=True):
            assert (len(chosen.ops), len(chosen.inputs)) == (len(region.ops), len(region.inputs))

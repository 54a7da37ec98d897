"""How the last block of a plan is run where something is swapped: the engine has to hear of it."""

from __future__ import annotations

import dataclasses

import pytest

from hyper_parallel.core.planner.model.abilities import Abilities
from hyper_parallel.core.planner.model.choices import plain, recompute_all, save_all
from hyper_parallel.core.planner.model.profile import StepProfile
from hyper_parallel.core.planner.search import choosing
from hyper_parallel.core.planner.search.choosing import choose, problem_of, timeline_under
from hyper_parallel.core.planner.search.settings import Setting
from support.planner_cases import NO_HURRY, as_measured, op, region, transformer


@pytest.fixture(scope="module")
def profile() -> StepProfile:
    return as_measured(transformer(4, differ=False))


def test_it_is_a_region_of_ours_that_says_that_it_ends_the_forward_also_where_the_host_is_the_slower_one(
    profile: StepProfile,
) -> None:
    pytest.importorskip("torch")
    from hyper_parallel.core.planner.model.mismatches import Mismatches
    from hyper_parallel.platform.torch.planner.applying import PlannedCall

    regions = profile.regions[-2:]
    whole = [recompute_all(each) for each in regions]

    def calls(*decisions: object, is_announced: bool) -> list[object]:
        call = PlannedCall(regions, decisions, Mismatches("error"), is_announced, by_framework=True)
        return [None if each is None else each[0] for each in call._calls]

    assert calls(*whole, is_announced=False) == [None, None], "the framework's own checkpoint"
    first, last = calls(*whole, is_announced=True)
    assert not first.ends_forward  # type: ignore[attr-defined]
    assert last.ends_forward  # type: ignore[attr-defined]
    assert calls(plain(regions[0]), plain(regions[1]), is_announced=True)[-1].ends_forward  # type: ignore[attr-defined]


def test_the_rules_count_on_it_only_where_the_engine_can_hear_of_it(profile: StepProfile) -> None:
    def is_clear(given: StepProfile) -> bool:
        return problem_of(given, 10**12, Setting(10**10, 10**10), 0).turn_is_clear

    silent = dataclasses.replace(profile, abilities=Abilities(loads_by_region=True))
    swapping = dataclasses.replace(profile, regions=(*profile.regions[:-1], transformer(1, differ=False).regions[0]))
    empty = dataclasses.replace(profile, regions=(*profile.regions[:-1], region(op(0, choices=("recompute",)))))
    assert is_clear(profile)
    assert not is_clear(silent)
    assert not is_clear(swapping), "its own sources would be in the turn"
    assert not is_clear(empty), "it has no residual that is told"


def test_a_last_block_that_is_plain_is_run_as_a_region_on_the_timeline(
    profile: StepProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choosing, "_POLISH_S", NO_HURRY)
    budget = profile.base_bytes + int(0.6 * profile.activation_peak_bytes)
    found = choose(profile, budget, time_limit_s=NO_HURRY)
    assert any(each.swaps for each in found.decision)
    last = profile.regions[-1]
    told, silent = (
        timeline_under(dataclasses.replace(profile, abilities=Abilities(loads_by_region=True, turn_is_clear=tells)),
                       (*found.decision[:-1], plain(last)), found.setting)
        for tells in (True, False)
    )  # fmt: skip
    saved = timeline_under(profile, (*found.decision[:-1], save_all(last)), found.setting)
    assert told.step_ms == saved.step_ms
    assert told.step_ms <= silent.step_ms


def test_a_region_that_cannot_save_what_it_must_stays_plain() -> None:
    must_run = region(op(5, choices=("recompute",)))
    assert save_all(must_run) == plain(must_run)
    assert save_all(region(op(5))).ops == ("save",)

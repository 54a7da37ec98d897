"""Real steps that take longer than predicted: what is planned then, and which plan is taken."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hyper_parallel.core.planner.model.abilities import HostCost
from hyper_parallel.core.planner.model.choices import recompute_all
from hyper_parallel.core.planner.model.problem import Problem, evaluate
from hyper_parallel.core.planner.model.profile import StepProfile
from hyper_parallel.core.planner.plan import proof
from hyper_parallel.core.planner.plan.plan import Measured, MemoryPlan
from hyper_parallel.core.planner.search import choosing
from hyper_parallel.core.planner.search.choosing import unmanaged
from support.planner_cases import NO_HURRY, transformer


class Steps:
    """Stands for real steps: every region that is neither plain nor recomputed whole takes `more_ms` of the host."""

    def __init__(self, patch: pytest.MonkeyPatch, more_ms: float, simple_more_ms: float = 0.0) -> None:
        self.more_ms, self.simple_more_ms = more_ms, simple_more_ms
        self.measured: list[MemoryPlan] = []
        patch.setattr(proof, "_measured", self)

    def __call__(self, plan: MemoryPlan, profiled: object, *, times: bool = True) -> Measured:
        self.measured.append(plan)
        simple = [each.is_plain or each == whole(plan, index) for index, each in enumerate(plan.decision)]
        predicted_ms = evaluate(Problem(plan.profile, 0, 0, 0), plan.decision).step_ms
        more_ms = self.simple_more_ms if all(simple) else sum(self.more_ms for each in simple if not each)
        return Measured(plan.predicted.peak_bytes, predicted_ms + more_ms)


def whole(plan: MemoryPlan, index: int) -> object:
    return recompute_all(plan.profile.regions[index])


def planned(profile: StepProfile) -> MemoryPlan:
    budget = profile.base_bytes + int(0.5 * profile.activation_peak_bytes)
    return proof.planned(profile, budget, object())


@pytest.fixture(autouse=True)
def _solved_once(monkeypatch: pytest.MonkeyPatch, known: dict[str, MemoryPlan]) -> None:
    """Each problem is solved once, and to the end: a limit of time would make answers depend on how busy this machine is."""
    solved = proof.solved
    monkeypatch.setattr(choosing, "_POLISH_S", 60.0)

    def remembered(profile: StepProfile, allowed_bytes: int, **ways: Any) -> MemoryPlan:
        key = repr((profile, allowed_bytes, sorted(ways.items())))
        if key not in known:
            known[key] = solved(profile, allowed_bytes, **ways, time_limit_s=NO_HURRY)
        plan = known[key]
        return MemoryPlan(profile, plan.decision, plan.setting, plan.budget_bytes, plan.predicted, gap=plan.gap)

    monkeypatch.setattr(proof, "solved", remembered)


@pytest.fixture(scope="module")
def known() -> dict[str, MemoryPlan]:
    return {}


@pytest.fixture(scope="module")
def profile() -> StepProfile:
    found = transformer(3, differ=False)
    return dataclasses.replace(found, identity=dataclasses.replace(found.identity, device="cuda"), host=HostCost(0.0))


def test_steps_as_fast_as_predicted_are_left_alone(profile: StepProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, more_ms=0.0)
    plan = planned(profile)
    assert steps.measured == [plan]
    assert plan.measured is not None
    assert plan.measured.step_ms == pytest.approx(plan.predicted.step_ms, rel=0.01)


def test_where_regions_cost_the_host_too_much_blocks_are_left_alone_or_recomputed_whole(
    profile: StepProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(monkeypatch, more_ms=profile.step_ms)
    plan = planned(profile)
    first, second, third = steps.measured
    assert plan is second, "and recomputing every block is predicted to be slower"
    assert not any(each.swaps for each in third.decision), "regions that copy nothing cost the host less, and are tried"
    assert not any(each.is_plain or each == whole(first, i) for i, each in enumerate(first.decision[:-1]))
    assert all(each.is_plain or each == whole(plan, i) for i, each in enumerate(plan.decision))
    assert plan.profile.host.region_ms == pytest.approx(profile.step_ms, rel=0.2)
    assert plan.measured is not None
    assert plan.measured.peak_bytes <= plan.budget_bytes


def test_recomputing_every_block_is_tried_where_a_margin_leaves_nothing_else(
    profile: StepProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(monkeypatch, more_ms=profile.step_ms)
    decision = tuple(map(recompute_all, profile.regions))
    budget = evaluate(Problem(profile, 0, 0, 0), decision).peak_bytes  # so that a plan with a margin needs copies, too
    plan = proof.planned(profile, budget, object())
    assert plan is steps.measured[-1]
    assert plan.decision == decision


def test_regions_that_only_save_and_recompute_are_tried_where_the_host_is_the_slower_one(
    profile: StepProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(monkeypatch, more_ms=0.001 * profile.step_ms)
    slow = dataclasses.replace(profile, host=HostCost(profile.step_ms))
    plan = planned(slow)
    first, second = steps.measured
    assert all(each.is_plain or each == whole(first, i) for i, each in enumerate(first.decision)), "by its prediction"
    assert plan is second
    assert not any(each.swaps for each in plan.decision)
    assert plan.measured is not None
    assert plan.predicted.step_ms == plan.measured.step_ms
    assert first.measured is not None
    assert plan.measured.step_ms < first.measured.step_ms


def test_real_steps_have_the_last_word(profile: StepProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, more_ms=profile.step_ms, simple_more_ms=100 * profile.step_ms)
    plan = planned(profile)
    first, second, third = steps.measured
    assert plan is first
    assert all(each.is_plain or each == whole(second, i) for i, each in enumerate(second.decision))
    assert not any(each.swaps for each in third.decision)


@pytest.mark.parametrize(("more", "is_simple"), [(-0.02, True), (0.0, True), (0.03, False)])
def test_recomputing_every_block_is_taken_where_it_is_as_fast(
    profile: StepProfile, monkeypatch: pytest.MonkeyPatch, more: float, is_simple: bool
) -> None:
    """A plan that is hardly slower than predicted, and hardly faster than what needs neither copies nor policies."""
    steps = Steps(monkeypatch, more_ms=0.0)
    profile = dataclasses.replace(
        transformer(16, differ=False), link=None, identity=profile.identity, host=profile.host
    )
    decision = tuple(map(recompute_all, profile.regions))
    cost = evaluate(Problem(profile, 0, 0, 0), decision)
    budget = cost.peak_bytes + proof.first_margin(profile) + profile.activation_peak_bytes // 200
    wanted = proof.planned(profile, budget, object())
    assert wanted.decision != decision
    num_managed = sum(not (each.is_plain or each == whole(wanted, i)) for i, each in enumerate(wanted.decision))
    taken_ms = evaluate(Problem(profile, 0, 0, 0), wanted.decision).step_ms
    # Its steps take 0.99 of what blocks take that are left alone or recomputed whole, and these take more or less than predicted.
    simple_choice = unmanaged(profile, budget, proof.first_margin(profile))
    assert simple_choice is not None
    slow_ms = (0.99 * simple_choice.step_ms - taken_ms) / num_managed
    assert slow_ms > 0
    monkeypatch.setattr(proof, "_TOO_SLOW", 2.0)  # else it would be planned again
    steps = Steps(monkeypatch, more_ms=slow_ms, simple_more_ms=more * simple_choice.step_ms)
    plan = proof.planned(profile, budget, object())
    managed, simple = steps.measured
    assert managed.decision == wanted.decision
    assert all(each.is_plain or each == whole(simple, i) for i, each in enumerate(simple.decision))
    assert plan is (simple if is_simple else managed)


@pytest.mark.parametrize(
    ("overhead", "share", "is_managed"), [(0.02, 0.82, True), (0.02, 0.86, False), (0.01, 0.86, True)]
)
def test_where_the_device_waits_for_the_host_a_plan_must_leave_room_for_a_busy_one(
    profile: StepProfile, monkeypatch: pytest.MonkeyPatch, overhead: float, share: float, is_managed: bool
) -> None:
    """Its steps take this share of what recomputing every block takes. Three regions take three times the overhead: a twentieth is between the two."""
    slow = dataclasses.replace(profile, host=HostCost(overhead * profile.step_ms))
    Steps(monkeypatch, more_ms=0.0)
    all_whole = evaluate(Problem(slow, 0, 0, 0), tuple(map(recompute_all, slow.regions)))
    room_bytes = proof.first_margin(slow) + slow.activation_peak_bytes // 6
    whole_ms, budget = all_whole.step_ms, all_whole.peak_bytes + room_bytes
    simple = unmanaged(slow, budget, proof.first_margin(slow))
    assert simple is not None
    assert simple.step_ms > 0.9 * whole_ms, "so that it is not taken as it is as fast"
    monkeypatch.setattr(proof, "_HOST_DRIFT", 1.2)
    wanted = proof.planned(slow, budget, object())
    num_managed = sum(each.is_managed for each in wanted.decision)
    assert num_managed > 0
    taken_ms = evaluate(Problem(slow, 0, 0, 0), wanted.decision).step_ms
    assert taken_ms < share * whole_ms
    steps = Steps(monkeypatch, more_ms=(share * whole_ms - taken_ms) / num_managed)
    monkeypatch.setattr(proof, "_with_costlier_regions", lambda plan, profiled: [])
    plan = proof.planned(slow, budget, object())
    assert plan in steps.measured
    assert any(each.is_managed for each in plan.decision) == is_managed
    assert plan.measured is not None
    assert plan.measured.peak_bytes <= plan.budget_bytes
    assert plan.measured.step_ms is not None
    assert plan.measured.step_ms <= whole_ms


@pytest.mark.parametrize(("overhead", "is_managed"), [(0.02, False), (0.01, True)])
def test_in_full_checkpoints_memory_a_host_that_is_waited_for_is_not_asked_for_more(
    profile: StepProfile, monkeypatch: pytest.MonkeyPatch, overhead: float, is_managed: bool
) -> None:
    """Its steps take 0.97 of what recomputing every block was predicted to take, and that takes 1.05 of it: the one may be the other tomorrow."""
    slow = dataclasses.replace(profile, host=HostCost(overhead * profile.step_ms))
    decision = tuple(map(recompute_all, slow.regions))
    all_whole = evaluate(Problem(slow, 0, 0, 0), decision)
    budget, whole_ms = all_whole.peak_bytes, all_whole.step_ms
    assert unmanaged(slow, budget, proof.first_margin(slow)) is None
    wanted = proof.solved(slow, budget, margin_bytes=proof.first_margin(slow))
    num_managed = sum(each.is_managed for each in wanted.decision)
    assert wanted.predicted.step_ms < whole_ms, "else it is recomputed whole in any case"
    taken_ms = evaluate(Problem(slow, 0, 0, 0), wanted.decision).step_ms
    more_ms = (0.97 * whole_ms - taken_ms) / num_managed
    Steps(monkeypatch, more_ms=more_ms, simple_more_ms=0.05 * whole_ms)
    monkeypatch.setattr(proof, "_with_costlier_regions", lambda plan, profiled: [])
    plan = proof.planned(slow, budget, object())
    assert plan.decision == (wanted.decision if is_managed else decision)


def test_every_block_is_recomputed_where_blocks_left_alone_take_more_than_the_rules_say(
    profile: StepProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = dataclasses.replace(profile, host=HostCost(0.02 * profile.step_ms))
    decision = tuple(map(recompute_all, slow.regions))
    all_whole = evaluate(Problem(slow, 0, 0, 0), decision)
    budget = all_whole.peak_bytes + proof.first_margin(slow) + slow.activation_peak_bytes // 6
    steps = Steps(monkeypatch, more_ms=0.0)

    def larger(plan: MemoryPlan, profiled: object, *, times: bool = True) -> Measured:
        found = steps(plan, profiled, times=times)
        is_left_alone = any(each.is_plain for each in plan.decision)
        return Measured(plan.budget_bytes + 1, found.step_ms) if is_left_alone else found

    monkeypatch.setattr(proof, "_measured", larger)
    monkeypatch.setattr(proof, "_HOST_DRIFT", 2.0)
    plan = proof.planned(slow, budget, object())
    managed, left_alone, _ = (each.decision for each in steps.measured)
    assert any(each.is_managed for each in managed)
    assert left_alone == unmanaged(slow, budget, proof.first_margin(slow)).decision
    assert plan.decision == decision


def test_a_little_slower_is_left_alone_and_so_is_a_framework_whose_profile_does_not_ask(
    profile: StepProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(monkeypatch, more_ms=0.01 * profile.step_ms)
    assert planned(profile) is steps.measured[-1]
    assert len(steps.measured) == 1
    steps = Steps(monkeypatch, more_ms=profile.step_ms)
    assert planned(dataclasses.replace(profile, host=None)) is steps.measured[-1]
    assert len(steps.measured) == 1


class Profiled:
    """Stands for a real model: its steps take `above_bytes`, and a millisecond, or run out of memory."""

    model = None

    def __init__(self, above_bytes: int = 1, *, tells_time: bool = True, runs_out: bool = False) -> None:
        self._above_bytes, self.tells_time, self._runs_out = above_bytes, tells_time, runs_out
        self.num_timed = 0

    def peaks_within(self, num_steps: int, *, num_before: int) -> int:
        return self._above_bytes

    def step_ms_within(self) -> float | None:
        self.num_timed += 1
        return None if self._runs_out else 1.0


def test_steps_are_timed_where_that_tells_anything_and_the_budget_is_kept(
    profile: StepProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryPlan, "apply", lambda self, model: None)
    monkeypatch.setattr(MemoryPlan, "remove", lambda self, model: None)
    plan = proof.solved(profile, profile.base_bytes + profile.activation_peak_bytes // 2, margin_bytes=0)
    room = plan.budget_bytes - profile.base_bytes

    def measured(profiled: Profiled, **ways: bool) -> tuple[Measured | None, int]:
        return proof._measured(plan, profiled, **ways), profiled.num_timed

    kept = Measured(plan.budget_bytes, 1.0)
    assert measured(Profiled(room)) == (kept, 1)
    assert measured(Profiled(room), times=False) == (dataclasses.replace(kept, step_ms=None), 0)
    assert measured(Profiled(room, tells_time=False)) == (dataclasses.replace(kept, step_ms=None), 0)
    assert measured(Profiled(room + 1)) == (Measured(plan.budget_bytes + 1), 0)
    assert measured(Profiled(room, runs_out=True)) == (None, 1), "planned again, as where a peak ran out"

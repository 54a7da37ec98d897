"""The one profile of ranks that hold parts of one model."""

from __future__ import annotations

import dataclasses
from typing import Any

from hyper_parallel.core.planner.model.agreement import common_profile
from hyper_parallel.core.planner.model.choices import plain
from hyper_parallel.core.planner.model.problem import Problem, evaluate
from hyper_parallel.core.planner.model.profile import Input, ProfiledOp, Region, StepProfile, StorageFacts

_ALL = ("save", "swap", "recompute")


def _op(
    name: str, *, is_needed: bool = True, choices: tuple[str, ...] = _ALL, num_bytes: int = 8, **others: Any
) -> ProfiledOp:
    look = (f"float32[{num_bytes // 4}]",)
    return ProfiledOp(
        "", name, 0, 0, 1.0, (StorageFacts(num_bytes, is_needed),), choices=choices, result_metas=look, **others
    )


def _profile(*ops: ProfiledOp, peak_bytes: int = 100, path: str = "0", may_swap: bool = True) -> StepProfile:
    inputs = (Input(StorageFacts(8, True), may_swap),)
    region = Region(path, 0, ops, inputs, 1.0, 1.0, 8, 8)
    return StepProfile((region,), base_bytes=10, peak_bytes=peak_bytes, step_ms=2.0)


def _ops(*profiles: StepProfile) -> dict[str, ProfiledOp]:
    common = common_profile(profiles)
    assert common is not None
    assert common == common_profile(profiles)
    return {op.name: op for op in common.regions[0].ops}


def test_profiles_that_are_alike_stay_as_they_are() -> None:
    profile = _profile(_op("a"), _op("b", is_needed=False))
    assert common_profile([profile, dataclasses.replace(profile, step_ms=9.0)]) == profile


def test_the_highest_peak_is_planned_for() -> None:
    common = common_profile([_profile(_op("a"), peak_bytes=100), _profile(_op("a", num_bytes=16), peak_bytes=200)])
    assert common is not None
    assert (common.peak_bytes, common.regions[0].ops[0].num_bytes) == (200, 16)


def test_results_of_another_size_are_not_compared() -> None:
    ops = _ops(_profile(_op("a"), _op("b")), _profile(_op("a", num_bytes=12), _op("b")))
    assert [ops[name].result_metas for name in "ab"] == [(), ("float32[2]",)]
    assert [ops[name].choices for name in "ab"] == [_ALL, _ALL]


def test_a_choice_is_one_that_all_ranks_have() -> None:
    small = _profile(_op("a", choices=("save", "recompute")), may_swap=False)
    common = common_profile([_profile(_op("a")), small])
    assert common is not None
    assert common.regions[0].ops[0].choices == ("save", "recompute")
    assert not common.regions[0].inputs[0].may_swap


def test_an_op_of_one_rank_is_known_to_all_and_run_again() -> None:
    more = _profile(_op("fill", is_needed=False), _op("a"))
    for profiles in ([more, _profile(_op("a"))], [_profile(_op("a")), more]):
        ops = _ops(*profiles)
        assert {*ops} == {"fill", "a"}
        assert ops["fill"].choices == ("recompute",)
        assert ops["a"].choices == _ALL


def test_an_op_of_another_rank_costs_nothing() -> None:
    fewer = _profile(_op("a"), peak_bytes=200)
    common = common_profile([fewer, _profile(_op("fill", is_needed=False), _op("a"))])
    assert common is not None
    costs = [evaluate(Problem(each, 1000, 0, 0), tuple(map(plain, each.regions))) for each in (fewer, common)]
    assert costs[0] == costs[1]


def test_a_block_that_keeps_results_of_other_ops_on_each_rank_runs_again_as_a_whole() -> None:
    for other in (_profile(_op("a")), _profile(_op("a"), _op("b", is_needed=False))):
        ops = _ops(_profile(_op("a"), _op("b")), other)
        assert {op.choices for op in ops.values()} == {("recompute",)}


def test_ranks_that_run_other_blocks_have_no_common_profile() -> None:
    assert common_profile([_profile(_op("a")), _profile(_op("a"), path="1")]) is None

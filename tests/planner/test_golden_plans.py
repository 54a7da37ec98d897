"""The planner decides for kept profiles what it decided when that was stored. See `support/golden_plans.py`."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("scipy", reason="the solver is in SciPy")

from support import golden_plans as golden

STORED = golden.stored()
CASES = [(name, way) for name in golden.NAMES for way in golden.WAYS]
WHAT_TO_DO = "If it must be so: PYTHONPATH=src:tests python tests/support/golden_plans.py --write-decisions"


def test_every_profile_is_kept_and_has_four_decisions_in_every_way() -> None:
    assert {path.name.removesuffix(".json.gz") for path in golden.PROFILES.iterdir()} == set(golden.NAMES)
    assert all(path.stat().st_size < 200_000 for path in golden.PROFILES.iterdir())
    assert {
        (name, way): len(each) for name, ways in STORED["plans"].items() for way, each in ways.items()
    } == dict.fromkeys(CASES, 4)


def test_stored_decisions_are_of_many_kinds() -> None:
    """Else a change of the planner would not show."""
    blocks = [line for name, way in CASES for plan in STORED["plans"][name][way] for line in plan["blocks"]]
    assert len(set(blocks)) > 50
    assert "plain" in blocks
    assert sum({*"swr"} <= {*line} for line in blocks if line != "plain") > 10


@pytest.mark.parametrize(("name", "way"), CASES)
def test_the_smallest_budget_is_the_stored_one(name: str, way: str) -> None:
    profile = golden.profile_of(name, way)
    assert golden.smallest_bytes(profile) == STORED["plans"][name][way][0]["budget_bytes"], WHAT_TO_DO


@pytest.mark.parametrize(("name", "way"), CASES)
def test_decisions_are_the_stored_ones(name: str, way: str) -> None:
    profile = golden.profile_of(name, way)
    then = STORED["plans"][name][way]
    now = [golden.decided(profile, each["budget_bytes"]) for each in then]
    if golden.solver_version() == STORED["scipy"]:
        assert differences(now, then) == [], WHAT_TO_DO
    else:  # of two decisions that are as good it may take the other one, and no worse one
        assert [each["step_ms"] / other["step_ms"] < 1.002 for each, other in zip(now, then, strict=True)] == [True] * 4


def differences(now: list[dict[str, Any]], then: list[dict[str, Any]]) -> list[str]:
    """In words: which budget, what, stored, now."""
    return [
        f"budget {number}, {what}: stored {value}, now {own[what]}"
        for number, (own, other) in enumerate(zip(now, then, strict=True), 1)
        for what, value in other.items()
        # The last digits of a sum are those of the order in which it was taken.
        if own[what] != (pytest.approx(value, rel=1e-9) if what == "step_ms" else value)
    ]


def test_one_op_that_is_decided_otherwise_is_a_difference() -> None:
    then = STORED["plans"]["llama"]["as on an accelerator"]
    now = copy.deepcopy(then)
    assert differences(now, then) == []
    number, line = next((number, line) for number, line in enumerate(now[1]["blocks"]) if "w" in line.partition("|")[0])
    now[1]["blocks"][number] = line.replace("w", "s", 1)
    assert len(differences(now, then)) == 1
    assert differences(now, then)[0].startswith("budget 2, blocks: stored ")

"""The campaigns are not blind: each planted bug is found."""

from __future__ import annotations

from typing import Any

import pytest

from hyper_parallel.core.swap.engine import SwapEngine
from support.planted_bugs import ENGINE, REDUNDANT, EngineBug
from support.planting import beside, unchanged
from support.swap_programs import InPlaceProgram, Program


class InjectedError(Exception):
    pass


def find_planted(bug: EngineBug, num_seeds: int = 1500) -> str | None:
    """What the campaign said of the bug, with the seed; None if it ran through."""
    modules = beside(bug, SwapEngine)
    for seed in range(num_seeds):
        try:
            _run(bug.campaign, seed, modules)
        except Exception as error:
            return f"seed {seed}: {type(error).__name__}: {error}"
    return None


def _run(campaign: str, seed: int, modules: Any) -> None:
    if campaign == "in place":
        InPlaceProgram(seed, modules=modules).run()
    elif campaign == "programs":
        Program(seed, modules=modules).run()
    else:
        program = Program(seed, modules=modules, num_actions=5)
        program.device.fail_call(1 + seed % 60, InjectedError)
        try:
            program.run()
            return
        except InjectedError:
            pass  # the rest stands outside: in here the error's frames still hold what they were about to save
        program.forwards.clear()
        program.held.clear()
        program.device._failures.clear()
        program.forward()
        program.backward(program.forwards[-1], retain=False)
        program.finish()


@pytest.mark.parametrize("bug", ENGINE, ids=lambda bug: bug.name)
def test_the_campaign_finds(bug: EngineBug) -> None:
    found = find_planted(bug)
    assert found is not None, "nothing found: the campaign is blind here, or the statement does nothing"
    print(found)


@pytest.mark.parametrize("campaign", sorted({bug.campaign for bug in ENGINE}))
def test_the_campaign_finds_nothing_where_nothing_was_planted(campaign: str) -> None:
    lowest = "give-block"  # all modules above its own are loaded anew
    bug = EngineBug("none", lowest, unchanged, campaign)
    assert find_planted(bug, num_seeds=200) is None


def test_there_are_at_least_twenty() -> None:
    assert len({bug.name for bug in ENGINE}) >= 20


@pytest.mark.parametrize("bug", REDUNDANT, ids=lambda bug: bug.name)
def test_a_statement_listed_as_redundant_is_still_there(bug: EngineBug) -> None:
    beside(bug, SwapEngine)

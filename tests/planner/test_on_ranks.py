"""Ranks that plan together come to one answer."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from support import planning_on_ranks as programs
from support import processes


@pytest.mark.parametrize("way", programs.WAYS)
def test_a_budget_that_one_rank_cannot_keep_is_refused_by_all(way: str) -> None:
    first, second = processes.pool("torch", 2).run(programs.refused_by_one_rank, way, deadline_s=60)
    assert first == second
    assert "No choice of what to save, swap and recompute fits" in first


@pytest.mark.parametrize("way", programs.WAYS)
def test_ranks_train_under_one_plan_where_they_run_other_ops_or_sizes(way: str) -> None:
    first, second = processes.pool("torch", 2).run(programs.trained_under_a_plan, way, deadline_s=60)
    assert first == second
    assert first["equal"]
    assert not first["is empty"]
    assert not any(first["stats"].values())


def test_steps_that_time_regions_are_taken_by_all_ranks_or_by_none() -> None:
    assert processes.pool("torch", 2).run(programs.steps_that_one_rank_wants, deadline_s=60) == [2, 2]

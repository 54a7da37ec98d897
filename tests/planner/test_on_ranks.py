"""Ranks that plan one model together come to one answer."""

from __future__ import annotations

import pytest

from support import planning_on_ranks as programs
from support import processes

pytest.importorskip("torch")


def test_a_budget_that_one_rank_cannot_keep_is_refused_by_all() -> None:
    first, second = processes.pool("torch", 2).run(programs.refused_by_one_rank, deadline_s=60)
    assert first == second
    assert "No choice of what to save, swap and recompute fits" in first

"""Pipelines whose stages are sharded give the losses and gradients of one process, and gather when the schedule says."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from support import processes
from support import sharded_pipelines as programs

DEADLINE_S = 120


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("name", programs.SCHEDULES)
def test_stages_that_are_sharded_train_as_one_process(name: str, zero: int) -> None:
    for worst, (gathers, reductions), leased in processes.pool("torch", 4).run(
        programs.train, name, zero, deadline_s=DEADLINE_S
    ):
        assert worst <= 1e-12
        assert leased == []
        if zero < 3:
            assert gathers == 2  # each of the two blocks of a rank once
        assert reductions == (2 if zero == 1 else 16)  # of each block, once or for each of 8 microbatches


def test_two_threads_of_a_pair_use_what_the_schedule_has_gathered() -> None:
    for worst, _, leased in processes.pool("torch", 4).run(
        programs.train, "dualpipe_v", 2, with_coordinator=True, deadline_s=DEADLINE_S
    ):
        assert worst <= 1e-12
        assert leased == []

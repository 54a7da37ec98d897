"""A scaler of gradients leaves out a step on all ranks, or on none."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from support import processes, sharding_scaler


def test_an_infinite_gradient_on_one_rank_stops_the_step_of_all() -> None:
    results = processes.pool("torch", 2).run(sharding_scaler.steps_of_which_one_overflows_on_one_rank, deadline_s=60)
    assert results == [([True, False, True], 2.0), ([True, False, True], 2.0)]

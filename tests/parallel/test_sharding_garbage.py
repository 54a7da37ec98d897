"""What is collected when differs from rank to rank, and changes nothing: neither gradients, nor the order of collectives."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from support import processes, sharding_garbage


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_graph_that_one_rank_keeps_delays_nothing(zero: int) -> None:
    worst = processes.pool("torch", 2).run(sharding_garbage.steps_with_a_graph_that_one_rank_keeps, zero, deadline_s=60)
    assert max(worst) <= 1e-12

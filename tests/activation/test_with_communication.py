"""Regions and swapping around code that communicates: hand-written layers on `torch.distributed`, and distributed tensors."""

from __future__ import annotations

import pytest

from support import communicating_regions as programs
from support import processes

pytest.importorskip("torch")


@pytest.mark.parametrize("ranks", [2, 4])
def test_code_that_calls_torch_distributed_itself_has_its_gradients_bit_by_bit(ranks: int) -> None:
    for found in processes.pool("torch", ranks).run(programs.communicating_layers, deadline_s=120):
        assert len(found) == len(programs.COMMUNICATIONS) * len(programs.WRAPS)
        assert [name for name, is_equal in found.items() if not is_equal] == []


@pytest.mark.parametrize("is_sequence_parallel", [False, True], ids=["tensor parallel", "sequence parallel"])
def test_distributed_tensors_are_recomputed_and_swapped_by_their_parts_and_parameters_stay(
    is_sequence_parallel,
) -> None:
    for found in processes.pool("torch", 2).run(programs.distributed_blocks, is_sequence_parallel, deadline_s=120):
        assert [way for way, (is_equal, _) in found.items() if not is_equal] == []
        moving = {way: moved for way, (_, moved) in found.items() if "swap" in way or way == "inputs"}
        assert min(moving.values()) > 0, moving
        assert found["recompute"][1] == found["save matmuls"][1] == 0

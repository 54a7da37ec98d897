"""A Llama block on MindSpore's ranks: the gradients of one device, and exactly the collectives that it needs."""

from __future__ import annotations

import pytest

from support import processes

pytest.importorskip("mindspore")


@pytest.mark.parametrize("kind", ["Dense", "Linear"])
@pytest.mark.parametrize("is_sequence_parallel", [False, True], ids=["tensor parallel", "sequence parallel"])
def test_a_llama_block_has_the_gradients_of_one_device_and_sends_what_it_must(
    is_sequence_parallel: bool, kind: str
) -> None:
    from support.mindspore_llama import llama_block

    for found in processes.pool("mindspore", 2).run(llama_block, kind, is_sequence_parallel, 2, deadline_s=180):
        assert found["difference"] < 1e-6
        if is_sequence_parallel:
            assert found["forward"] == {"all_gather": 2, "reduce_scatter": 2}
            # the weights of the two norms meet a split sequence: their gradients are summed
            assert found["backward"] == {"all_gather": 2, "reduce_scatter": 2, "all_reduce": 2}
        else:
            assert found["forward"] == {"all_reduce": 2}
            assert found["backward"] == {"all_reduce": 2}

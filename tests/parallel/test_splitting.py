"""A sequence cut into stages keeps its modules and their names, on both frameworks."""

from __future__ import annotations

import pytest

from support.interpreter import run_fresh

# One weight in two modules of one stage, and in a module of the next one.
PROGRAM = {
    "torch": """
from torch import nn
import hyper_parallel as hp
first, second, last = (nn.Linear(4, 4, bias=False) for _ in range(3))
second.weight = last.weight = first.weight
stages = hp.split_stages(nn.Sequential(first, second, nn.Linear(4, 4), last), 2)
result = [(sorted(name for name, _ in stage.trained()), sorted(stage.tied.items())) for stage in stages]
""",
    "mindspore": """
from mindspore import nn
import hyper_parallel as hp
first, second, last = (nn.Dense(4, 4, has_bias=False) for _ in range(3))
second.weight = first.weight
stages = hp.split_stages(nn.SequentialCell(first, second, nn.Dense(4, 4), last), 2)
result = [(sorted(name for name, _ in stage.trained()), sorted(stage.tied.items())) for stage in stages]
""",
}


def test_a_weight_that_modules_share_is_one_weight_of_a_stage_and_tied_to_the_next() -> None:
    pytest.importorskip("torch")
    first, second = run_fresh(PROGRAM["torch"], HYPER_PARALLEL_PLATFORM="torch")
    assert first == [["0.weight"], [["0.weight", "0.weight"]]]
    assert second == [["2.bias", "2.weight", "3.weight"], [["3.weight", "0.weight"]]]


def test_a_weight_that_cells_of_one_stage_share_is_one_weight_there() -> None:
    pytest.importorskip("mindspore")
    first, second = run_fresh(PROGRAM["mindspore"], HYPER_PARALLEL_PLATFORM="mindspore")
    assert len(first[0]) == 1
    assert len(second[0]) == 3

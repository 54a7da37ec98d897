"""Pipelines on real ranks train as one process does: every schedule, on both frameworks, and stages that are not easy."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from support import processes
from support.schedule_names import SCHEDULES

torch = pytest.importorskip("torch")

from support import pipeline_programs as programs
from support import pipelines

DEADLINE_S = 120
LARGEST = {"torch": 1e-12, "mindspore": 1e-6}  # float64; float32, whose sums dualpipe takes in another order
FOUR_STAGES_ON_TWO_RANKS = ["interleaved", "zbv", "dualpipe_v"]


def run(number: int, function: Any, *arguments: object, framework: str = "torch") -> list[Any]:
    return processes.pool(framework, number).run(function, *arguments, deadline_s=DEADLINE_S)


def training(framework: str) -> ModuleType:
    if framework == "torch":
        return pipelines
    pytest.importorskip("mindspore")
    from support import mindspore_pipelines

    return mindspore_pipelines


@pytest.mark.parametrize("framework", ["torch", "mindspore"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_losses_and_gradients_of_every_schedule_are_those_of_one_process(name: str, framework: str) -> None:
    for error, wrong in run(2, training(framework).train, name, 2, 4, framework=framework):
        assert error <= LARGEST[framework]
        assert wrong == []


@pytest.mark.parametrize(("name", "framework"), [*((name, "torch") for name in SCHEDULES), ("zbv", "mindspore")])
def test_four_ranks_train_as_one_process(name: str, framework: str) -> None:
    for error, wrong in run(4, training(framework).train, name, 4, 8, framework=framework):
        assert error <= LARGEST[framework]
        assert wrong == []


@pytest.mark.parametrize(("name", "num"), [("gpipe", 1), ("one_f_one_b", 1), ("one_f_one_b", 3), ("interleaved", 3), ("zbv", 1)])
def test_few_microbatches_and_odd_numbers_of_them_train_as_well(name: str, num: int) -> None:
    for error, wrong in run(2, pipelines.train, name, 2, num):
        assert error <= 1e-12
        assert wrong == []


def test_one_rank_alone_is_a_pipeline_too() -> None:
    ((error, wrong),) = run(1, pipelines.train, "one_f_one_b", 1, 3)
    assert error <= 1e-12
    assert wrong == []


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "interleaved", "zbv", "dualpipe_v"])
def test_the_runtime_of_pytorch_gives_the_same(name: str) -> None:
    assert run(2, pipelines.like_pytorch, name) == [[], []]


@pytest.mark.parametrize("name", FOUR_STAGES_ON_TWO_RANKS)
@pytest.mark.parametrize("title", programs.PROGRAMS)
def test_stages_that_are_not_easy_train_as_in_one_process(title: str, name: str) -> None:
    assert run(2, programs.compare, title, name) == [[], []]


def test_only_a_weight_that_is_used_twice_gets_its_gradient_with_the_inputs() -> None:
    """The first stage has no input that needs a gradient: all of its backward waits."""
    first, second = run(2, pipelines.undeferred, "zbv")
    assert first == {0: (), 3: ("block.twice.weight",)}
    assert second == {1: ("twice.weight",), 2: ("twice.weight",)}


@pytest.mark.parametrize("name", ["one_f_one_b", "zbv"])
def test_a_step_leaves_nothing_to_the_collector(name: str) -> None:
    for counts in run(2, pipelines.objects_over_steps, name, 12):
        # A send that is not over yet may hold one tensor; a step that leaves one each would leave eight.
        assert max(counts[3:]) - min(counts[3:]) <= 2, counts

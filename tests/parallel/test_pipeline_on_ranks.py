"""Pipelines on real ranks train as one process does: every schedule, on both frameworks, and stages that are not easy."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from support import pipeline_programs as programs
from support import pipelines, processes
from support.schedule_names import SCHEDULES

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


@pytest.mark.parametrize(
    ("name", "num"), [("gpipe", 1), ("one_f_one_b", 1), ("one_f_one_b", 3), ("interleaved", 3), ("zbv", 1)]
)
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


def test_one_tensor_in_two_stages_of_a_rank_counts_once_though_nobody_tied_it() -> None:
    assert all(max(wrong) <= 1e-12 for wrong in run(2, programs.one_tensor_in_two_stages_of_each_rank))


@pytest.mark.parametrize("name", FOUR_STAGES_ON_TWO_RANKS)
def test_weights_that_were_frozen_when_the_pipeline_was_made_can_be_trained_and_stay_tied(name: str) -> None:
    assert run(2, programs.thawed, name) == [[], []]


@pytest.mark.parametrize("name", FOUR_STAGES_ON_TWO_RANKS)
def test_a_weight_of_the_loss_gets_its_gradient(name: str) -> None:
    assert sorted(run(2, programs.weight_of_the_loss, name), key=str) == [None, True]


def test_a_weight_of_a_loss_gets_its_gradient_on_mindspore_too() -> None:
    (error,) = run(1, training("mindspore").weight_of_the_loss, framework="mindspore")
    assert error <= 1e-6


def test_cells_are_cut_by_cost() -> None:
    ((counted, measured, is_untouched),) = run(1, training("mindspore").cut_by_cost, framework="mindspore")
    assert counted == [40, 320]
    assert min(measured) > 0
    assert is_untouched


def test_a_loss_of_another_dtype_than_in_the_first_step_is_refused() -> None:
    first, second = _failing(programs.a_loss_of_another_dtype, deadline_s=5)
    assert "The loss is of another form than in the first step" in (first or second)


@pytest.mark.parametrize("name", ["one_f_one_b", "zbv"])
def test_a_step_leaves_nothing_to_the_collector(name: str) -> None:
    for counts in run(2, pipelines.objects_over_steps, name, 12):
        # A send that is not over yet may hold one tensor; a step that leaves one each would leave eight.
        assert max(counts[3:]) - min(counts[3:]) <= 2, counts


REFUSED = {
    "other stages": "The schedule places other stages here.\nExpected stages [0, 3] of 4, got stages [0] of 4",
    "another number of ranks": "Expected 3 ranks, got 2",
    "no stages": "A pipeline has stages",
    "another schedule on one rank": "All ranks of a pipeline follow one schedule",
    "no schedule": "A pipeline follows a schedule",
    "a schedule that cannot run": "ScheduleError",
    "a tied weight that is not there": "Expected one of linear.weight, linear.bias, got weight; stage 0",
    "a place outside": "got index 4 (int), num_stages 4 (int)",
    "a batch that cannot be cut": "Expected a multiple of 4 micro batches, got 7",
    "another number of microbatches": "Expected 4, got 1",
    "weights of nothing": "Weights count something",
    "a weight without bound": "Expected finite numbers from 0",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_on_every_rank_before_anything_is_sent(case: str) -> None:
    said = run(2, programs.refused, case)
    assert REFUSED[case] in said[0]
    assert said[1] != "nothing was raised"


def test_shapes_that_change_without_a_word_are_refused_by_the_rank_that_sends() -> None:
    with pytest.raises(processes.RankError) as caught:
        run(2, programs.other_lengths_without_saying_so)
    assert "of another form than in the first step" in str(caught.value)
    assert "dynamic_shapes=True" in str(caught.value)


def test_an_object_whose_contents_change_without_a_word_is_refused_as_well() -> None:
    with pytest.raises(processes.RankError) as caught:
        run(2, programs.same_object_with_other_contents)
    assert "The result of stage 0 for microbatch 0 is of another form than in the first step" in str(caught.value)


def test_weights_may_get_their_data_after_they_became_a_stage() -> None:
    first, second = run(2, programs.made_without_data)
    assert first == second > 0


def test_an_output_that_is_written_over_before_it_was_sent_is_an_error() -> None:
    first, _ = _failing(programs.an_output_that_is_written_over)
    assert first.startswith("The result of stage 0 for microbatch 0 was written over")


def test_after_a_step_that_failed_the_pipeline_says_so_and_runs_no_other() -> None:
    first, _ = _failing(programs.a_step_after_one_that_failed)
    assert first.startswith("A step of this pipeline failed")


def _failing(function: Any, deadline_s: float = 10) -> list[Any]:
    """What the ranks return, though the second one is left waiting."""
    try:
        return processes.pool("torch", 2).run(function, deadline_s=deadline_s)
    except processes.RankError as error:
        return [error.results.get(rank) for rank in range(2)]


@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("way", ["raises", "dies"])
@pytest.mark.parametrize("name", ["one_f_one_b", "zbv"])
def test_a_rank_that_fails_is_named_by_the_other(name: str, way: str, kind: str) -> None:
    with pytest.raises(processes.RankError) as caught:
        run(2, pipelines.fail_in, name, kind, 1, way)
    failures = caught.value.failures
    assert "on purpose" in failures[1] if way == "raises" else "3" in failures[1]
    assert 0 in failures or way == "raises"


def test_pairs_of_a_schedule_run_through_the_coordinator_with_a_layer_of_experts() -> None:
    for wrong, num_pairs in run(2, programs.experts_in_pairs):
        assert wrong == []
        assert num_pairs > 0


def test_a_loss_that_depends_on_no_weight_is_an_error() -> None:
    (said,) = run(1, programs.a_loss_of_nothing)
    assert said.startswith("The loss depends on no weight")
